// Shows the numbers under the pointer or by the arrow keys. They come from the table of each chart, so the page is complete without it.
for (const figure of document.querySelectorAll("figure[data-curve]")) {
  const chart = figure.querySelector(".chart"), cursor = figure.querySelector(".cursor"), tip = figure.querySelector(".tip");
  const names = [...figure.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
  const rows = [...figure.querySelectorAll("tbody tr")];
  let shown = rows.length - 1;
  const show = (index) => {
    shown = Math.max(0, Math.min(rows.length - 1, index));
    const cells = [...rows[shown].children].map((cell) => cell.textContent.trim());
    const at = Number(rows[shown].dataset.at);
    tip.textContent = cells.map((text, i) => `${names[i]} ${text}`).join("\n");
    tip.hidden = false;
    cursor.setAttribute("x1", at);
    cursor.setAttribute("x2", at);
    cursor.style.visibility = "visible";
    const right = at > chart.viewBox.baseVal.width / 2, part = (100 * at) / chart.viewBox.baseVal.width;
    tip.style.left = right ? "auto" : `calc(${part}% + 8px)`;
    tip.style.right = right ? `calc(${100 - part}% + 8px)` : "auto";
  };
  const hide = () => { tip.hidden = true; cursor.style.visibility = "hidden"; };
  chart.addEventListener("pointermove", (event) => {
    const box = chart.getBoundingClientRect();
    const at = ((event.clientX - box.left) / box.width) * chart.viewBox.baseVal.width;
    const far = rows.map((row) => Math.abs(Number(row.dataset.at) - at));
    show(far.indexOf(Math.min(...far)));
  });
  chart.addEventListener("pointerleave", () => { if (document.activeElement !== chart) hide(); });
  chart.addEventListener("focus", () => show(shown));
  chart.addEventListener("blur", hide);
  chart.addEventListener("keydown", (event) => {
    const next = { ArrowLeft: shown - 1, ArrowRight: shown + 1, Home: 0, End: rows.length - 1 }[event.key];
    if (event.key === "Escape") hide();
    if (next === undefined) return;
    event.preventDefault();
    show(next);
  });
}
