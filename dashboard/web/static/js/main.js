import { keepTimesCurrent } from "./times.js";
import { connect } from "./live.js";
import { themeToggle } from "./toggle.js";
import { strips } from "./strip.js";

themeToggle(document.getElementById("theme"));
keepTimesCurrent();
strips();
connect();
