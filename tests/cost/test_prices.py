"""The table of prices: what it says, how it is asked, and catalogues from files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from steadytrain.cost import prices
from steadytrain.cost.prices import find_offer, known_price, matching, parse_price, refresh
from steadytrain.errors import InputError

CATALOGUE = """\
InstanceType,AcceleratorName,AcceleratorCount,vCPUs,MemoryGiB,GpuInfo,Price,SpotPrice,Region,AvailabilityZone
p3.2xlarge,V100,1.0,8.0,61.0,,3.06,0.9915,us-east-1,use1-az2
p3.2xlarge,V100,1.0,8.0,61.0,,3.06,0.9180,us-east-1,use1-az4
p3.2xlarge,V100,1.0,8.0,61.0,,3.305,,eu-west-1,euw1-az1
c9.huge,,,96.0,192.0,,4.5,1.5,us-east-1,use1-az2
broken,,,1.0,1.0,,,,us-east-1,use1-az2
"""


def test_every_row_has_a_price_a_source_and_a_day() -> None:
    rows = prices._own_offers()
    assert len(rows) > 60
    for row in rows:
        assert row.source and re.fullmatch(r"20\d\d(-\d\d-\d\d)?", row.date), row
        assert row.region and row.instance and (row.on_demand or row.spot), row
        assert row.spot is None or row.on_demand is None or row.spot < row.on_demand, row
        assert not row.accelerator or (row.count >= 1 and row.accelerator in prices.peaks()), row


@pytest.mark.parametrize(
    ("instance", "per_hour"), [("p2.xlarge", 0.9), ("p2.16xlarge", 14.4), ("g2.8xlarge", 2.6), ("p3.16xlarge", 24.48)]
)
def test_the_machines_of_the_old_articles_are_there(instance: str, per_hour: float) -> None:
    """720 USD for 50 hours of p2.16xlarge, as the article on ImageNet has it."""
    rows = [row for row in prices._own_offers() if row.instance == instance and row.date < "2019"]
    assert per_hour in [row.on_demand for row in rows]
    assert find_offer("p2.16xlarge").price().money(50 * 3600) == pytest.approx(720.0)


@pytest.mark.parametrize(
    ("text", "per_hour", "currency"),
    [
        ("2.40", 2.4, "USD"),
        ("0", 0.0, "USD"),
        ("2.4 EUR", 2.4, "EUR"),
        ("2.4eur/h", 2.4, "EUR"),
        ("$2.40", 2.4, "USD"),
        ("chf 2.40 / hour", 2.4, "CHF"),
        ("0.30 €/kWh @ 1.2 kW", 0.36, "EUR"),
        ("€", None, ""),
        ("0.30 EUR/kWh@450W", 0.135, "EUR"),
        ("0.3/kwh@1000 W", 0.3, "USD"),
        ("p3.2xlarge", 3.06, "USD"),
        ("P3.2XLARGE@us-east-1", 3.06, "USD"),
        ("aws/p2.16xlarge@us-west-2:spot", 1.6, "USD"),
    ],
)
def test_a_price_in_a_word(text: str, per_hour: float | None, currency: str) -> None:
    if per_hour is None:
        with pytest.raises(InputError):
            parse_price(text)
        return
    price = parse_price(text)
    assert price.per_hour == pytest.approx(per_hour) and price.currency == currency and price.date


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("-1", "--price is -1; it must be 0 or more"),
        ("1e12", "below a billion"),
        ("1.2.3", "must be a number"),
        ("2,40 EUR", "must be a number, such as 2.40"),
        ("$2.40 EUR", "names two currencies"),
        ("0.30 EUR/kWh@0W", "0 W are no machine's"),
        ("0.30/kWh", "0.30/kWh@450W"),
        ("p3.2xlrge", "Did you mean p3.2xlarge"),
        ("azur/p3.2xlarge", "it has prices in aws us-east-1"),
        ("p3.2xlarge@us-east-9", "it has prices in aws us-east-1"),
        ("p3.2xlarge:spott", "only spot is allowed"),
        ("c5.xlarge:spot", "no spot price of c5.xlarge is known; only on demand: steady cost prices --refresh FILE"),
    ],
)
def test_what_is_no_price_is_told_with_what_is_near(text: str, complaint: str) -> None:
    with pytest.raises(InputError, match=re.escape(complaint)) as error:
        parse_price(text)
    assert "\n" not in str(error.value)


def test_the_recipe_goes_before_the_environment() -> None:
    assert known_price(None, {}) is None
    from_environment = known_price(None, {"STEADYTRAIN_PRICE": "5"})
    from_recipe = known_price("4", {"STEADYTRAIN_PRICE": "5"})
    assert from_environment and from_environment.per_hour == 5 and from_recipe and from_recipe.per_hour == 4
    with pytest.raises(InputError, match="STEADYTRAIN_PRICE is -1"):
        known_price(None, {"STEADYTRAIN_PRICE": "-1"})


def test_a_catalogue_from_a_file_holds_from_then_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "aws" / "vms.csv"
    file.parent.mkdir()
    file.write_text(CATALOGUE)
    before = find_offer("p3.2xlarge")
    kept = refresh(str(file))
    assert (kept.cloud, kept.rows, kept.left_out) == ("aws", 4, 1)
    spot = find_offer("p3.2xlarge", spot=True)
    assert (spot.spot, spot.zone) == (0.918, "use1-az4"), "the cheapest zone"
    assert spot.date == kept.date > before.date and spot.source == str(file)
    assert find_offer("p3.2xlarge", region="eu-west-1").on_demand == 3.305
    assert find_offer("p3.2xlarge", region="use1-az2", spot=True).spot == 0.9915
    assert [row.instance for row in matching(["c9"])] == ["c9.huge"]
    assert any(row.date < "2019" for row in matching(["p3.2xlarge"])), "the old ones stay"


def test_google_s_machines_without_their_gpus_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "vms.csv"
    lines = [
        "InstanceType,AcceleratorName,Region,Price",
        "a2-highgpu-1g,,us-central1,0.73948",
        "n2-standard-8,,us-central1,0.39",
    ]
    file.write_text("\n".join(lines))
    kept = refresh(str(file), cloud="gcp")
    assert (kept.rows, kept.left_out) == (1, 1)
    assert find_offer("a2-highgpu-1g").on_demand == pytest.approx(3.673385)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("a,b\n1,2\n", "lacks the columns InstanceType, Price, Region"),
        ("InstanceType,Region,Price\nx,,\n", "no prices"),
        ("InstanceType,Region,Price\n" + "x" * 200_000, "it is no CSV"),
    ],
)
def test_what_is_no_catalogue_changes_nothing(
    content: str, complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEADYTRAIN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "vms.csv").write_text(content)
    with pytest.raises(InputError, match=complaint):
        refresh(str(tmp_path / "vms.csv"), cloud="aws")
    assert not (tmp_path / "cache").exists()
