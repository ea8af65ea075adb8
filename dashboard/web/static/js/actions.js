// Acknowledge, silence, annotate: the API takes JSON from the dashboard's own pages only.
const NAME = "kvlens.name";

export function actions(refresh) {
  const box = document.getElementById("act");
  if (!box) return;
  box.hidden = false;
  const [name, text] = ["name", "text"].map((field) => box.querySelector(`[name=${field}]`));
  name.value = stored();
  const problem = box.querySelector("[role=alert]");
  const buttons = [...box.querySelectorAll("button[data-act]")];
  for (const button of buttons) {
    button.addEventListener("click", async () => {
      const act = button.dataset.act;
      problem.hidden = true;
      if (act === "annotate" && !text.value.trim()) {
        say(problem, "Write the note first.");
        text.focus();
        return;
      }
      for (const other of buttons) other.disabled = true;
      try {
        await send(box.dataset.incidentId, act, name.value, text.value, box);
        keep(name.value);
        text.value = "";
        refresh();
      } catch (error) {
        say(problem, error.message);
      } finally {
        for (const other of buttons) other.disabled = false;
      }
    });
  }
}

async function send(incident, act, name, text, box) {
  const body = { name: name.trim(), text: text.trim() };
  if (act === "unacknowledge") body.acknowledged = false;
  if (act === "silence") body.seconds = Number(box.querySelector("[name=seconds]").value);
  const verb = act === "unacknowledge" ? "acknowledge" : act;
  const answer = await fetch(`/api/v1/incidents/${encodeURIComponent(incident)}/${verb}`, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (answer.ok) return;
  const said = await answer.text();
  let detail = said;
  try {
    detail = JSON.parse(said).detail ?? said;
  } catch {
    // Plain text says it already.
  }
  throw new Error(`It was not kept: ${detail || answer.status}`);
}

function say(problem, message) {
  problem.textContent = message;
  problem.hidden = false;
}

function stored() {
  try {
    return localStorage.getItem(NAME) ?? "";
  } catch {
    return "";
  }
}

function keep(name) {
  try {
    localStorage.setItem(NAME, name);
  } catch {
    // Without storage the name is asked for again.
  }
}
