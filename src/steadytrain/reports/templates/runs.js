(() => {
  const here = (id) => document.getElementById(id);

  const seen = {};

  // The page as it is now: a part that has changed is put in its place.
  async function look() {
    try {
      const now = new DOMParser().parseFromString(await (await fetch("./")).text(), "text/html");
      const focus = document.activeElement?.id;
      const changed = ["counts", "heads", "rows", "legend", "data"].filter((id) => seen[id] !== (seen[id] = now.getElementById(id).innerHTML));
      for (const id of changed) here(id).replaceChildren(...now.getElementById(id).childNodes);
      if (changed.length) curves.show(JSON.parse(here("data").textContent));
      sorting.apply(here("rows").parentElement);
      if (focus) here(focus)?.focus();
      here("lost").hidden = true;
    } catch {
      here("lost").hidden = false;
    }
    setTimeout(look, document.hidden ? 10000 : 2000);
  }
  document.body.dataset.ready = "";
  setTimeout(look, here("rows").children.length ? 2000 : 0);
})();
