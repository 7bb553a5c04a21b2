"use strict";
// What a mark says when it is pointed at or touched.
const tip = document.getElementById("tip");
const hide = () => { tip.hidden = true; };
const show = (event) => {
  const mark = event.target.closest("[data-tip]");
  if (!mark) return hide();
  tip.textContent = mark.dataset.tip;
  tip.hidden = false;
  const room = 14, box = tip.getBoundingClientRect();
  const right = event.clientX + room, below = event.clientY + room;
  const left = right + box.width > innerWidth - 8 ? event.clientX - room - box.width : right;
  const top = below + box.height > innerHeight - 8 ? event.clientY - room - box.height : below;
  tip.style.transform = `translate(${Math.max(8, left)}px, ${Math.max(8, top)}px)`;
};
for (const kind of ["pointermove", "pointerdown"]) document.addEventListener(kind, show);
for (const kind of ["scroll", "pointerleave"]) document.addEventListener(kind, hide, { passive: true });
// A click on a head sorts its table; figures by their value, the rest by its words. Nothing stays last.
const compared = (first, second) => {
  const [a, b] = [first.dataset.value, second.dataset.value];
  if (a !== undefined && b !== undefined) return a - b;
  return first.textContent.localeCompare(second.textContent, "en", { numeric: true });
};
for (const head of document.querySelectorAll("th")) {
  head.addEventListener("click", () => {
    const body = head.closest("table").tBodies[0], place = head.cellIndex;
    const down = head.getAttribute("aria-sort") === "ascending";
    const empty = (row) => row.cells[place].dataset.value === undefined;
    const rows = [...body.rows].sort((a, b) =>
      (head.classList.contains("figure") ? empty(a) - empty(b) : 0)
      || (down ? -1 : 1) * compared(a.cells[place], b.cells[place]));
    for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    body.append(...rows);
  });
}
// On paper nothing can be opened.
addEventListener("beforeprint", () => {
  for (const group of document.querySelectorAll("details.group")) group.open = true;
});
