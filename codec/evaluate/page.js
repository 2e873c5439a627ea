"use strict";
// Tables: a click, Enter or Space on a heading sorts by it, and again the other way round.
function valueOf(cell) {
  const value = cell.dataset.value;
  if (value === undefined) return cell.textContent.trim();
  return value === "" ? null : Number(value);
}
function sort(heading) {
  const table = heading.closest("table");
  const column = [...heading.parentNode.children].indexOf(heading);
  const falling = heading.getAttribute("aria-sort") === "ascending";
  for (const other of heading.parentNode.children) other.removeAttribute("aria-sort");
  heading.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const body = table.tBodies[0];
  const rows = [...body.rows].map((row) => [valueOf(row.cells[column]), row]);
  rows.sort(([a], [b]) => {
    if (a === null || b === null) return (a === null) - (b === null); // undefined ones last, either way
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
    return falling ? -order : order;
  });
  for (const [, row] of rows) body.append(row);
}
for (const heading of document.querySelectorAll("th[data-sort]")) {
  heading.firstElementChild.addEventListener("click", () => sort(heading));
}
// Which statistic the summary shows.
const statistic = document.getElementById("statistic");
if (statistic) {
  statistic.addEventListener("change", () => {
    for (const cell of document.querySelectorAll("td[data-mean]")) {
      cell.dataset.value = cell.dataset[statistic.value];
      cell.textContent = cell.dataset.value === "" ? "–" : Number(cell.dataset.value).toFixed(cell.dataset.digits);
      if (statistic.value === "mean" && cell.dataset.interval) {
        const span = document.createElement("span");
        span.className = "ci";
        span.textContent = " " + cell.dataset.interval;
        cell.append(span);
      }
    }
    const heading = document.querySelector("#summary th[aria-sort]");
    if (heading) { // keep the order true
      heading.setAttribute("aria-sort", heading.getAttribute("aria-sort") === "ascending" ? "descending" : "ascending");
      sort(heading);
    }
  });
}
// Players: one at a time; the next of the same clip goes on where the last one was.
const same = document.getElementById("same-place");
let last = null;
for (const player of document.querySelectorAll("audio")) {
  player.addEventListener("play", () => {
    if (last && last !== player) {
      const place = last.currentTime;
      const going = !last.paused && !last.ended;
      last.pause();
      if (same && same.checked && going && last.dataset.clip === player.dataset.clip) player.currentTime = place;
    }
    last = player;
  });
}
