// Applies the chosen theme before anything is painted: a module would run too late, and the page would flash.
(() => {
  "use strict";
  const KEY = "rouse.theme";
  const CHOICES = ["system", "light", "dark"];

  function stored() {
    try {
      const choice = localStorage.getItem(KEY);
      return choice !== null && CHOICES.includes(choice) ? choice : "system";
    } catch {
      return "system"; // The browser keeps nothing for this page.
    }
  }

  /** @param {string} choice */
  function apply(choice) {
    document.documentElement.dataset.theme = choice;
    const button = document.getElementById("theme");
    if (button) button.textContent = `Theme: ${choice}`;
  }

  let choice = stored();
  apply(choice);
  document.addEventListener("DOMContentLoaded", () => {
    apply(choice);
    document.getElementById("theme")?.addEventListener("click", () => {
      choice = CHOICES[(CHOICES.indexOf(choice) + 1) % CHOICES.length];
      apply(choice);
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // It holds until the page is closed.
      }
    });
  });
})();
