// Asks for the admin token.

import { el, text } from "./dom.js";
import { ApiError, call, hasToken, reasonOf, setToken } from "./api.js";

/** @param {() => void} done Called once a token is accepted. @returns {import("./types.js").View} */
export function loginView(done) {
  // An old token that is no longer accepted is worth a word; the first visit is not.
  const status = el(
    "p",
    { class: "outcome", role: "alert" },
    hasToken() ? "The gateway does not accept the token of this tab any more." : "",
  );
  const token = el("input", {
    id: "token",
    type: "password",
    autocomplete: "current-password",
    required: true,
    spellcheck: "false",
  });
  const root = el(
    "form",
    { class: "login", onsubmit },
    el("h1", { tabindex: "-1" }, "Log in"),
    el(
      "p",
      {},
      "This gateway has an admin token: ",
      el("code", {}, "admin.token"),
      " in its configuration. This tab keeps it until you log out or close the tab.",
    ),
    el("label", { for: "token" }, "Admin token"),
    token,
    status,
    el("button", { type: "submit", class: "primary" }, "Log in"),
  );

  /** @param {SubmitEvent} event */
  async function onsubmit(event) {
    event.preventDefault();
    text(status, "");
    setToken(token.value.trim());
    try {
      await call("/admin/v1/fleet");
      done();
    } catch (error) {
      setToken(null);
      text(
        status,
        error instanceof ApiError && error.status === 401
          ? "The gateway does not accept this token."
          : `No login: ${reasonOf(error)}.`,
      );
      token.select();
    }
  }
  return { title: "Log in", root, update: () => {} };
}
