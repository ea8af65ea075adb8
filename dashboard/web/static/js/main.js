import { keepTimesCurrent } from "./times.js";
import { connect } from "./live.js";
import { themeToggle } from "./toggle.js";
import { shortAddresses } from "./filters.js";
import { strips } from "./strip.js";

shortAddresses();
themeToggle(document.getElementById("theme"));
keepTimesCurrent();
strips();
connect();
