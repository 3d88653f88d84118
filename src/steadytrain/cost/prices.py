"""Dated prices: the table that comes with the package, catalogues that the user fetched, and machines of one's own.

>>> parse_price("2.40").per_hour, parse_price("0.30 EUR/kWh@450W").per_hour
(2.4, 0.135)
>>> price = parse_price("p2.16xlarge@us-east-1")
>>> price.per_hour, price.name, price.date
(14.4, 'aws p2.16xlarge us-east-1, on demand', '2018-03-16')
"""

from __future__ import annotations

import csv
import json
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

from steadytrain.errors import InputError, StorageError, did_you_mean, read_errors, storage_errors
from steadytrain.files import replace_file
from steadytrain.format import count, few
from steadytrain.machine.facts import cache_folder

TABLE = Path(__file__).with_name("prices.toml")
VARIABLE = "STEADYTRAIN_PRICE"
HOME_REGIONS = ("us-east-1", "us-central1", "eastus")
"""The regions that are meant where none is named: those that the clouds' own price lists show first."""
SEPARATE = re.compile(r"(a2|a3|a4|a4x|g2|g4)-")
"""Families of Google's machines whose GPUs a catalogue lists, and prices, on lines of their own."""
SYMBOLS = {"$": "USD", "€": "EUR", "£": "GBP"}
_AMOUNT = re.compile(
    r"(?P<before>[$€£]|[A-Z]{3} )? ?(?P<amount>[-+]?[\d.,]+(e[-+]?\d+)?) ?(?P<after>[A-Z]{3}|[$€£])?"
    r"(?P<unit> ?/ ?(h|hour|kWh( ?@ ?(?P<watts>[\d.]+) ?(?P<kilo>k)?W)?))?",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True)
class Offer:
    """One row of a table of prices, in USD an hour; ``estimate``: what was worked out and not read, if anything."""

    cloud: str
    region: str
    instance: str
    zone: str = ""
    accelerator: str = ""
    count: float = 0
    on_demand: float | None = None
    spot: float | None = None
    source: str = ""
    date: str = ""
    estimate: str = ""

    def price(self, *, spot: bool = False) -> Price:
        """Return its price; it must have one of that kind."""
        per_hour = self.spot if spot else self.on_demand
        assert per_hour is not None
        place = self.zone if spot and self.zone else self.region
        name = f"{self.cloud} {self.instance} {place}, {'spot' if spot else 'on demand'}"
        return Price(name=name, per_hour=per_hour, date=self.date, source=self.source, estimate=self.estimate)


@dataclass(frozen=True, kw_only=True)
class Price:
    """The price of one machine for an hour: which machine, of which date (``YYYY-MM-DD``), and the source."""

    per_hour: Annotated[float, msgspec.Meta(ge=0, lt=1e18)]
    name: str = ""
    currency: str = "USD"
    date: str = ""
    source: str = ""
    estimate: str = ""

    def money(self, seconds: float) -> float:
        """Return what so many seconds of one machine cost."""
        return self.per_hour * seconds / 3600

    def __str__(self) -> str:
        """Format the price with its date.

        >>> str(Price(name="aws p3.2xlarge us-east-1, on demand", per_hour=3.06, date="2026-09-24"))
        '3.06 USD/h (aws p3.2xlarge us-east-1, on demand; price of 2026-09-24)'
        """
        about = "; ".join(filter(None, (self.name, f"price of {self.date}" if self.date else "")))
        return f"{self.per_hour:.6g} {self.currency}/h ({about})"

    @staticmethod
    def from_dict(values: object) -> Price | None:
        """Build it from what an event or a checkpoint holds; None where that is no price."""
        try:
            return msgspec.convert(values, Price)
        except msgspec.ValidationError:
            return None


def known_price(text: str | None, variables: Mapping[str, str] = os.environ) -> Price | None:
    """Return the price that a recipe (``parallel.price``) or else the environment names; None where neither does.

    Raises:
        InputError: it cannot be used.
    """
    if text:
        return parse_price(text, name="parallel.price (--price)")
    return parse_price(variables[VARIABLE], name=VARIABLE) if variables.get(VARIABLE) else None


def parse_price(text: str, *, name: str = "--price") -> Price:
    """Read a price: ``2.40``, ``2.40 EUR``, ``$2.40``, ``0.30 EUR/kWh@450W``, or ``[CLOUD/]INSTANCE[@REGION][:spot]``.

    An amount is of an hour of one machine, in USD if no currency is named, as of today.

    Raises:
        InputError: it is none of these, or there is no such instance.
    """
    amount = _AMOUNT.fullmatch(text.strip())
    if amount is None:
        place, _, kind = text.strip().partition(":")
        if kind.lower() not in ("", "spot"):
            raise InputError(f"{name} is {text!r}: after a colon only spot is allowed, as in {place}:spot")
        instance, _, region = place.partition("@")
        cloud, slash, instance = instance.rpartition("/")
        place_of = {"cloud": cloud if slash else None, "region": region or None}
        return find_offer(instance, spot=bool(kind), **place_of).price(spot=bool(kind))
    try:
        value = float(amount["amount"])
        watts = None if amount["watts"] is None else float(amount["watts"]) * (1000 if amount["kilo"] else 1)
    except ValueError:
        raise InputError(f"{name} is {text!r}; it must be a number, such as 2.40 or 2.40 EUR") from None
    if not 0 <= value < 1e9:
        limit = "0 or more" if value < 0 else "below a billion"
        raise InputError(f"{name} is {amount['amount']}; it must be {limit}")
    if amount["before"] and amount["after"]:
        raise InputError(f"{name} is {text!r}: it names two currencies; leave one out")
    currency = (amount["before"] or amount["after"] or "USD").strip().upper()
    currency = SYMBOLS.get(currency, currency)
    today = time.strftime("%Y-%m-%d")
    if "kwh" not in (amount["unit"] or "").lower():
        return Price(name="as given", per_hour=value, currency=currency, date=today)
    if watts is None:
        raise InputError(f"{name} is {text!r}: a price per kWh needs what the machine draws: {text.strip()}@450W")
    if not 0 < watts < 1e9:
        raise InputError(f"{name} is {text!r}: {watts:g} W are no machine's; give what it draws, such as @450W")
    about = f"as given: {value:g} {currency}/kWh at {watts:g} W"
    per_hour = value * watts / 1000
    return Price(name=about, per_hour=per_hour, currency=currency, date=today)


def find_offer(
    instance: str,
    *,
    cloud: str | None = None,
    region: str | None = None,
    spot: bool = False,
) -> Offer:
    """Return the newest offer of an instance; of several spot prices of a region the lowest.

    Args:
        instance: its name, in any case.
        cloud: None: any.
        region: a region or a zone; None: one of :data:`HOME_REGIONS` if it has a price there, else any.

    Raises:
        InputError: there is none; the message names what is near.
    """
    remedy = "steady cost prices lists what is known, and --price 2.40 gives a price by hand"
    named = [row for row in all_offers() if row.instance.lower() == instance.lower()]
    if not named:
        near = did_you_mean(instance.lower(), dict.fromkeys(row.instance.lower() for row in all_offers()))
        raise InputError(f"no price of an instance {instance!r} is known: {remedy}.{near}")
    priced = [row for row in select(named, cloud, region) if (row.spot if spot else row.on_demand) is not None]
    if not priced:
        kind, places = "spot" if spot else "on-demand", dict.fromkeys(f"{row.cloud} {row.region}" for row in named)
        asked = (("of", cloud), ("in", region))
        where = "".join(f" {word} {value}" for word, value in asked if value)
        known = f"it has prices in {few(list(places))}: {remedy}"
        if spot and select(named, cloud, region):
            known = "only on demand: steady cost prices --refresh FILE keeps a catalogue that has it, or --price 0.92"
        raise InputError(f"no {kind} price of {instance}{where} is known; {known}")
    if region is None:
        priced = [row for row in priced if row.region in HOME_REGIONS] or priced
    newest = max(row.date for row in priced)
    latest = [row for row in priced if row.date == newest]
    return min(latest, key=lambda row: row.spot or 0.0) if spot else latest[0]


def select(offers: Iterable[Offer], cloud: str | None = None, region: str | None = None) -> list[Offer]:
    """Return the offers of a cloud, and of a region or zone; None: of any."""
    return [
        offer
        for offer in offers
        if (cloud is None or offer.cloud == cloud.lower()) and region in (None, offer.region, offer.zone)
    ]


def all_offers() -> list[Offer]:
    """Return the rows of the package's own table and of every catalogue that was fetched."""
    rows = list(_own_offers())
    folder = _folder()
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        rows += _cached(path)
    return rows


@cache
def _own_offers() -> tuple[Offer, ...]:
    table = _table()
    rows = []
    for block in table["prices"]:
        source = table["sources"][block["source"]]
        common = {key: block[key] for key in ("cloud", "region") if key in block}
        rows += [Offer(**common, **row, source=source["text"], date=source["date"]) for row in block["rows"]]
    return tuple(rows)


@cache
def _table() -> dict[str, Any]:
    import tomllib

    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def peaks() -> Mapping[str, Mapping[str, Any]]:
    """Return the peaks of GPUs by the names that the table has: see the head of their part in ``prices.toml``."""
    accelerators: Mapping[str, Mapping[str, Any]] = _table()["accelerators"]
    return accelerators


def _cached(path: Path) -> list[Offer]:
    """Read a catalogue that was kept; one that was cut off or edited is as if it were not there."""
    try:
        catalogue = json.loads(path.read_text(encoding="utf-8"))
        common: dict[str, Any] = {name: str(catalogue[name]) for name in ("cloud", "source", "date")}
        return [Offer(**common, **row) for row in catalogue["rows"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def _folder() -> Path | None:
    folder = cache_folder()
    return folder and folder / "prices"


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """A catalogue that was kept: where, of which cloud and day, how many rows, and how many could not be used."""

    path: Path
    cloud: str
    date: str
    rows: int
    left_out: int


def refresh(source: str, *, cloud: str | None = None) -> Refreshed:
    """Keep the prices of a catalogue in the user's cache; they hold beside the package's own, the newest first.

    A catalogue is a CSV with the columns ``InstanceType``, ``Region`` and ``Price``, and perhaps ``AvailabilityZone``,
    ``SpotPrice``, ``AcceleratorName`` and ``AcceleratorCount``, as SkyPilot publishes one for each cloud
    (https://github.com/skypilot-org/skypilot-catalog).

    Args:
        source: a file, whose day is that of its last change.
        cloud: None: the folder that the file lies in, such as ``aws`` of ``catalogs/v8/aws/vms.csv``.

    Raises:
        InputError: it is no such catalogue, or no file.
        StorageError: it cannot be kept.
    """
    if "://" in source:
        raise InputError(f"--refresh is {source}; it takes a file: fetch it first (curl -LO {source})")
    path = Path(source)
    with read_errors(source, InputError):
        text = path.read_text(encoding="utf-8", errors="replace")
        date = time.strftime("%Y-%m-%d", time.localtime(path.stat().st_mtime))
    cloud = (cloud or path.absolute().parent.name).lower()
    if not re.fullmatch(r"[a-z][a-z0-9-]*", cloud):
        raise InputError(f"the cloud of {source} cannot be inferred from its folder: name it with --cloud aws")
    rows, left_out = _read_catalogue(text, source)
    folder = _folder()
    if folder is None:
        raise StorageError("there is no folder for caches: name one with STEADYTRAIN_CACHE=FOLDER")
    place = folder / f"{cloud}.json"
    with storage_errors(place):
        folder.mkdir(parents=True, exist_ok=True)
    replace_file(place, json.dumps({"cloud": cloud, "source": source, "date": date, "rows": rows}))
    return Refreshed(path=place, cloud=cloud, date=date, rows=len(rows), left_out=left_out)


def _read_catalogue(text: str, source: str) -> tuple[list[dict[str, Any]], int]:
    """Return the rows of a catalogue, and how many had no usable price. Raises InputError."""
    reader = csv.DictReader(text.splitlines())
    needed = {"InstanceType", "Region", "Price"}
    try:
        missing = sorted(needed - set(reader.fieldnames or ()))
        lines = [] if missing else list(reader)
    except csv.Error as error:
        raise InputError(f"{source} is no catalogue of prices: it is no CSV ({error})") from error
    if missing:
        raise InputError(
            f"{source} is no catalogue of prices: it lacks the column{'s' * (len(missing) > 1)} {', '.join(missing)}"
            " (a CSV as in https://github.com/skypilot-org/skypilot-catalog)"
        )
    rows: list[dict[str, Any]] = []
    left_out = 0
    for line in lines:
        instance, accelerator = line["InstanceType"] or "", line.get("AcceleratorName") or ""
        prices = {key: _amount(line.get(column)) for key, column in (("on_demand", "Price"), ("spot", "SpotPrice"))}
        if not instance or not line["Region"] or prices == {"on_demand": None, "spot": None}:
            left_out += 1
        elif not accelerator and SEPARATE.match(instance):
            left_out += 1  # its price is without the GPUs
        else:
            row = {"instance": instance, "region": line["Region"], "zone": line.get("AvailabilityZone") or ""}
            row |= {"accelerator": accelerator, "count": _amount(line.get("AcceleratorCount")) or 0, **prices}
            rows.append({key: value for key, value in row.items() if value not in ("", None)})
    if not rows:
        raise InputError(
            f"{source} has no prices in it: {count(left_out, 'line')} without an instance, region or price"
        )
    return rows, left_out


def _amount(text: str | None) -> float | None:
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if 0 <= value < 1e9 else None


def matching(words: Sequence[str], *, cloud: str | None = None, region: str | None = None) -> list[Offer]:
    """Return the offers of a cloud and a region or zone that have every word in one of their names.

    Raises:
        InputError: there is none.
    """

    def names(offer: Offer) -> str:
        return " ".join((offer.cloud, offer.region, offer.zone, offer.instance, offer.accelerator)).lower()

    offers = select(all_offers(), cloud, region)
    offers = [offer for offer in offers if all(word.lower() in names(offer) for word in words)]
    if not offers:
        filters = " ".join(filter(None, (*words, cloud, region)))
        raise InputError(f"no price matches {filters!r}; steady cost prices lists all")
    return offers


def to_dict(price: Price) -> dict[str, Any]:
    """Return a price as an event or a checkpoint holds it."""
    return {key: value for key, value in asdict(price).items() if value not in ("", None)}
