// What can be checked of accessibility without judgement; returns a list of findings.
() => {
  const rgb = (text) => {
    const canvas = document.createElement("canvas").getContext("2d");
    canvas.fillStyle = text;
    canvas.fillRect(0, 0, 1, 1);
    return [...canvas.getImageData(0, 0, 1, 1).data];
  };
  const luminance = (color) =>
    rgb(color)
      .slice(0, 3)
      .map((value) => value / 255)
      .map((value) => (value <= 0.03928 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
      .reduce((sum, value, index) => sum + value * [0.2126, 0.7152, 0.0722][index], 0);
  const ground = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const color = getComputedStyle(e).backgroundColor;
      if (rgb(color)[3] === 255) return color;
    }
    return "white";
  };
  const found = new Set();
  for (const element of document.querySelectorAll("main *, nav *, footer *")) {
    const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim());
    if (!own || element.closest("svg, .visually-hidden") || !element.offsetParent) continue;
    const [a, b] = [luminance(getComputedStyle(element).color), luminance(ground(element))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    const text = element.textContent.trim().slice(0, 40);
    if (ratio < 4.5) found.add(`contrast ${ratio.toFixed(2)}: ${element.className} "${text}"`);
  }
  for (const element of document.querySelectorAll("a[href], button, select, input, svg[role=img]")) {
    const named = element.getAttribute("aria-label") || element.textContent.trim() || element.labels?.length;
    if (!named && !element.hidden) found.add(`no name: ${element.outerHTML.slice(0, 90)}`);
  }
  for (const table of document.querySelectorAll("table")) {
    if (!table.caption) found.add(`no caption: ${table.outerHTML.slice(0, 90)}`);
  }
  const ids = [...document.querySelectorAll("[id]")].map((element) => element.id);
  for (const id of ids.filter((id, index) => ids.indexOf(id) !== index)) found.add(`twice: #${id}`);
  for (const element of document.querySelectorAll("[aria-labelledby]")) {
    const target = element.getAttribute("aria-labelledby");
    if (!document.getElementById(target)) found.add(`label missing: #${target}`);
  }
  return [...found];
}
