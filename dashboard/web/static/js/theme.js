// Runs before the first paint, so that a stored theme never flashes. Not a module for that reason.
(() => {
  const key = "kvlens.theme";
  const root = document.documentElement;
  try {
    const stored = localStorage.getItem(key);
    if (stored === "dark" || stored === "light") root.dataset.theme = stored;
  } catch {
    // Storage may be switched off: the system's theme is used then.
  }
})();
