import { keepTimesCurrent } from "./times.js";
import { connect, refreshNow } from "./live.js";
import { actions } from "./actions.js";
import { themeToggle } from "./toggle.js";
import { shortAddresses } from "./filters.js";
import { strips } from "./strip.js";

shortAddresses();
themeToggle(document.getElementById("theme"));
keepTimesCurrent();
strips();
actions(refreshNow);
connect();
