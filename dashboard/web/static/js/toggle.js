// Dark and light: the system's choice until the button is pressed, then what was chosen.
const KEY = "kvlens.theme";

export function themeToggle(button) {
  if (!button) return;
  const root = document.documentElement;
  const system = matchMedia("(prefers-color-scheme: dark)");
  button.hidden = false;
  button.addEventListener("click", () => {
    const current = root.dataset.theme ?? (system.matches ? "dark" : "light");
    root.dataset.theme = current === "dark" ? "light" : "dark";
    try {
      localStorage.setItem(KEY, root.dataset.theme);
    } catch {
      // Without storage the choice lasts for this page.
    }
  });
}
