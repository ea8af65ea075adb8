// Zoom, and the strip by keyboard: left and right walk the chunks of a row, up and down the rows.
export function strips() {
  for (const strip of document.querySelectorAll(".strip")) {
    zoom(strip);
    walk(strip);
  }
}

function zoom(strip) {
  const tools = strip.querySelector("[data-zoom-tools]");
  tools.hidden = false;
  const buttons = [...tools.querySelectorAll("button")];
  for (const button of buttons) {
    button.addEventListener("click", () => {
      const scroll = strip.querySelector(".strip-scroll");
      const middle = (scroll.scrollLeft + scroll.clientWidth / 2) / scroll.scrollWidth;
      strip.dataset.zoom = button.dataset.zoomTo;
      for (const other of buttons) other.setAttribute("aria-pressed", String(other === button));
      scroll.scrollLeft = middle * scroll.scrollWidth - scroll.clientWidth / 2;
    });
  }
}

function walk(strip) {
  const area = strip.querySelector(".strip-scroll");
  const readout = strip.querySelector("[data-readout]");
  const rows = [...strip.querySelectorAll(".strip-row")].map((row) => [...row.querySelectorAll("rect")]);
  let row = 0;
  let column = -1;
  const show = (cell) => {
    strip.querySelector(".is-on")?.classList.remove("is-on");
    if (!cell) return;
    const group = cell.closest(".strip-row").dataset.group;
    cell.classList.add("is-on");
    readout.textContent = `Group ${group}: ${cell.parentNode.querySelector("title").textContent}`;
  };
  area.addEventListener("pointerover", (event) => {
    if (event.target.classList?.contains("cell")) show(event.target);
  });
  area.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    row = Math.min(Math.max(row + step[0], 0), rows.length - 1);
    column = Math.min(Math.max(column + step[1], 0), rows[row].length - 1);
    show(rows[row][column]);
    rows[row][column]?.scrollIntoView({ block: "nearest", inline: "nearest" });
  });
}
