// Relative times grow old on an open page; the absolute time stays in the title.
const STEPS = [[86400, "d"], [3600, "h"], [60, "min"]];

export function ago(seconds) {
  if (Math.abs(seconds) < 2) return "just now";
  const distance = Math.floor(Math.abs(seconds));
  const [size, unit] = STEPS.find(([step]) => distance >= 2 * step) ?? [1, "s"];
  const text = `${Math.floor(distance / size).toLocaleString("en-US")} ${unit}`;
  return seconds > 0 ? `${text} ago` : `in ${text}`;
}

export function refreshTimes(root = document) {
  for (const element of root.querySelectorAll("time[data-ago]")) {
    element.textContent = ago((Date.now() - Date.parse(element.dateTime)) / 1000);
  }
}

export function keepTimesCurrent() {
  setInterval(refreshTimes, 10_000);
}
