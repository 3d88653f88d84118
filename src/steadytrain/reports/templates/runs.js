(() => {
  const here = (id) => document.getElementById(id);
  const figures = ["images/s", "cost", "age"];

  function cell(row, head) {
    const td = document.createElement(head === "run" ? "th" : "td");
    if (head === "run") td.scope = "row";
    if (figures.includes(head)) td.className = "figure";
    if (head === "run" && row.key) {
      const link = document.createElement("a");
      link.href = `run/${row.key}/`;
      link.textContent = row.run;
      td.append(link);
    } else if (head === "status") {
      const dot = document.createElement("span");
      dot.className = "dot";
      dot.setAttribute("aria-hidden", "true");
      td.className = `standing ${row.status}`;
      td.append(dot, row.status);
    } else {
      td.textContent = row[head];
    }
    return td;
  }

  function show(told) {
    here("counts").textContent = told.reading ? "reading the runs" : told.error || told.counts;
    if (told.reading) return;
    const heads = Object.keys(told.rows[0] ?? {}).filter((head) => head !== "key" && told.rows.some((row) => row[head]));
    here("heads").replaceChildren(...heads.map((head) => {
      const th = document.createElement("th");
      th.scope = "col";
      th.textContent = head;
      if (figures.includes(head)) th.className = "figure";
      return th;
    }));
    here("rows").replaceChildren(...told.rows.map((row) => {
      const tr = document.createElement("tr");
      tr.append(...heads.map((head) => cell(row, head)));
      return tr;
    }));
  }

  async function look() {
    try {
      const answer = await fetch("runs.json");
      show(await answer.json());
      here("lost").hidden = true;
    } catch {
      here("lost").hidden = false;
    }
    setTimeout(look, document.hidden ? 10000 : 2000);
  }
  look();
})();
