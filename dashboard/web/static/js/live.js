// Keeps a page current: an event makes it fetch itself and take over the parts marked
// data-live. The server renders everything once, there are no templates in the browser.
import { refreshTimes } from "./times.js";
import { strips } from "./strip.js";

const EVENTS = ["incident", "engine", "request"];
const GAP_MS = 1000; // between two refreshes that no incident asked for

const page = document.getElementById("main");
const wanted = new Set((page.dataset.events ?? "").split(" ").filter(Boolean));
const known = new Map(Object.entries(JSON.parse(document.body.dataset.known))); // open: id -> mark()

const fresh = new Set(); // incidents that came while the page was open

let timer = 0;
let last = 0;
let due = Infinity;
let stale = false;
let running = false;
let again = false;

export function connect() {
  const badge = document.getElementById("live");
  const show = (state, text) => {
    badge.dataset.state = state;
    badge.firstElementChild.textContent = text;
    badge.hidden = false;
  };
  show("off", "connecting");
  let interrupted = false;
  const source = new EventSource("/api/v1/stream");
  source.addEventListener("open", () => {
    show("open", "live");
    if (interrupted) schedule(0); // what was missed meanwhile
    interrupted = false;
  });
  source.addEventListener("error", () => {
    interrupted = true;
    show("lost", "reconnecting");
  });
  for (const name of EVENTS) {
    source.addEventListener(name, (event) => {
      const urgent = name === "incident";
      if (urgent && !news(event.data)) return; // on connecting, the stream repeats what is open
      if (urgent || wanted.has(name)) schedule(urgent ? 0 : GAP_MS);
    });
  }
  document.addEventListener("visibilitychange", () => {
    if (document.hidden || !stale) return;
    stale = false;
    schedule(0);
  });
  addEventListener("pagehide", () => source.close());
}

export function refreshNow() {
  schedule(0);
}

function schedule(gap) {
  if (gap && document.hidden) {
    stale = true; // nobody looks: once, when somebody does
    return;
  }
  const at = Math.max(Date.now(), last + gap);
  if (at >= due) return;
  due = at;
  clearTimeout(timer);
  timer = setTimeout(refresh, at - Date.now());
}

async function refresh() {
  due = Infinity;
  if (running) {
    again = true;
    return;
  }
  running = true;
  last = Date.now();
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" } });
    if (answer.ok) take(new DOMParser().parseFromString(await answer.text(), "text/html"));
  } catch {
    // The server is away; the stream reconnects by itself and asks again.
  } finally {
    running = false;
    if (again) {
      again = false;
      schedule(GAP_MS);
    }
  }
}

function take(answer) {
  const names = (root) => [...root.querySelectorAll("[data-live]")].map((e) => e.dataset.live).join();
  const whole = names(document) !== names(answer); // a part came or went: take all of them
  const pairs = whole
    ? [[page, answer.getElementById("main")], [find(document, "nav"), find(answer, "nav")]]
    : [...document.querySelectorAll("[data-live]")].map((old) => [old, find(answer, old.dataset.live)]);
  for (const [old, next] of pairs) {
    if (old.innerHTML === next.innerHTML) continue;
    const focused = old.contains(document.activeElement) ? document.activeElement : null;
    const again = focused?.getAttribute("href") ?? null;
    old.replaceChildren(...document.adoptNode(next).childNodes);
    if (again !== null) old.querySelector(`a[href="${CSS.escape(again)}"]`)?.focus();
  }
  document.title = answer.title;
  markFresh();
  refreshTimes();
  if (whole) strips();
}

function find(root, name) {
  return root.querySelector(`[data-live="${name}"]`);
}

function markFresh() {
  for (const element of document.querySelectorAll("[data-incident]")) {
    if (fresh.delete(element.dataset.incident)) element.classList.add("is-fresh");
  }
}

function news(data) {
  const incident = JSON.parse(data);
  const open = incident.state === "open";
  const before = known.get(incident.id);
  if (open) known.set(incident.id, mark(incident));
  else known.delete(incident.id);
  if (open && before === undefined) announce(incident);
  return open ? before !== mark(incident) : true;
}

// What changes when an incident does, or when somebody does something about it.
function mark(incident) {
  return [incident.updated_at, incident.handling?.acted_at ?? null].join();
}

function announce(incident) {
  fresh.add(incident.id);
  const text = `New ${incident.severity} incident on ${incident.engine_id}: ${incident.summary}`;
  document.getElementById("announce").textContent = text;
  if (!find(document, "incidents") && !find(document, "open")) toast(incident, text);
}

function toast(incident, text) {
  const box = document.getElementById("toast");
  const link = document.createElement("a");
  link.href = `/incidents/${encodeURIComponent(incident.id)}`;
  link.textContent = text;
  const close = document.createElement("button");
  close.type = "button";
  close.className = "button mini";
  close.textContent = "Dismiss";
  close.addEventListener("click", () => (box.hidden = true));
  const row = document.createElement("div");
  row.className = "toast-row";
  row.append(link, close);
  box.replaceChildren(row);
  box.hidden = false;
}
