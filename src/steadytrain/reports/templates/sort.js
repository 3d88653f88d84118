// A click on a head sorts its table: of figures the highest come first, of words the first of the alphabet.
const sorting = (() => {
  const order = new Map();
  const words = (row, at) => (row.cells[at].dataset.value ?? row.cells[at].textContent).trim();
  function apply(table) {
    const [at, direction] = order.get(table) ?? [];
    if (at === undefined) return;
    const head = table.tHead.rows[0].cells[at], isFigure = head.classList.contains("figure");
    const value = (row) => (isFigure ? Number.parseFloat(words(row, at).replace(/,|^mAP /g, "")) : words(row, at));
    const isEmpty = (value) => value === "" || Number.isNaN(value);
    const compare = (a, b) => (isFigure ? a - b : a.localeCompare(b, undefined, { numeric: true }));
    const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
    rows.sort(([a], [b]) => isEmpty(a) - isEmpty(b) || (isEmpty(a) ? 0 : direction * compare(a, b)));
    table.tBodies[0].append(...rows.map(([, row]) => row));
    for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
  }
  for (const table of document.querySelectorAll(".sortable")) {
    table.tHead.addEventListener("click", (event) => {
      const head = event.target.closest("button")?.parentElement;
      if (!head) return;
      const [before, direction] = order.get(table) ?? [];
      order.set(table, [head.cellIndex, before === head.cellIndex ? -direction : head.classList.contains("figure") ? -1 : 1]);
      apply(table);
    });
  }
  return { apply };
})();
