// Calls to the admin API. The token is in this tab's session storage and in a header, never in a URL.

const KEY = "rouse.token";

/** An answer that is no success, in the words of the API. */
export class ApiError extends Error {
  /** @param {number} status @param {string} code @param {string} message */
  constructor(status, code, message) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export function hasToken() {
  return sessionStorage.getItem(KEY) !== null;
}

/** @param {string | null} token */
export function setToken(token) {
  if (token === null) sessionStorage.removeItem(KEY);
  else sessionStorage.setItem(KEY, token);
}

/**
 * Calls the API; throws an `ApiError` unless the answer is a success.
 *
 * @param {string} path
 * @param {RequestInit} [options]
 */
export async function call(path, options = {}) {
  const headers = new Headers(options.headers);
  const token = sessionStorage.getItem(KEY);
  if (token !== null) headers.set("authorization", `Bearer ${token}`);
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const error = body?.error;
  // An engine's own 401, to a chat, says nothing about this token.
  if (error?.code === "invalid_token") document.dispatchEvent(new CustomEvent("unauthorized"));
  throw new ApiError(response.status, error?.code ?? "", error?.message ?? `the gateway answered ${response.status}`);
}

/** @param {string} path @param {RequestInit} [options] */
export async function json(path, options) {
  return (await call(path, options)).json();
}

/** The path of a model's subresource. @param {string} model @param {string} what */
export function modelPath(model, what) {
  return `/admin/v1/models/${encodeURIComponent(model)}/${what}`;
}

/** What to tell a person about a call that threw. @param {unknown} error */
export function reasonOf(error) {
  if (error instanceof ApiError) return error.message;
  return "the gateway cannot be reached";
}
