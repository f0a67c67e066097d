// Copy commands without their prompts.
document.addEventListener("click", (event) => {
  const button = event.target.closest("[data-clipboard-target]");
  const code = button && document.querySelector(button.dataset.clipboardTarget);
  if (code && code.closest(".language-console, .highlight")?.querySelector(".gp")) {
    button.dataset.clipboardText = code.innerText.replace(/^\$ /gm, "");
  }
}, true);

// Let the keyboard reach the first of each explained term.
const explained = new Set();
for (const term of document.querySelectorAll("abbr[title]")) {
  if (!explained.has(term.title)) term.tabIndex = 0;
  explained.add(term.title);
}
