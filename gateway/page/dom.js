// Builds and updates elements. Text is always text: nothing here takes markup.

/**
 * Creates an element. A property that begins with `on` is a listener, `data` an object of data attributes; null and
 * false are left out.
 *
 * @param {string} tag
 * @param {Record<string, any>} [properties]
 * @param {...(Node | string | number | null | undefined)} children
 * @returns {any}
 */
export function el(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "data") Object.assign(element.dataset, value);
    else attribute(element, name, value);
  }
  element.append(.../** @type {Node[]} */ (children.filter((child) => child !== null && child !== undefined)));
  return element;
}

/**
 * Sets or removes an attribute, if that changes anything.
 *
 * @param {Element} element
 * @param {string} name
 * @param {any} value
 */
export function attribute(element, name, value) {
  if (value === null || value === undefined || value === false) {
    if (element.hasAttribute(name)) element.removeAttribute(name);
    return;
  }
  const text = value === true ? "" : String(value);
  if (element.getAttribute(name) !== text) element.setAttribute(name, text);
}

/**
 * Sets an element's text, if it is another: a selection in it stays otherwise.
 *
 * @param {Element} element
 * @param {any} value
 */
export function text(element, value) {
  const next = String(value ?? "");
  if (element.textContent !== next) element.textContent = next;
}

/** Shows or hides an element. @param {HTMLElement} element @param {boolean} visible */
export function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

/** @type {WeakMap<Element, Map<any, any>>} */
const rowsOf = new WeakMap();

/**
 * Makes the children of `container` those of `items`, by key: an item that stays keeps its element, and with it focus
 * and selection.
 *
 * @template T
 * @param {Element} container Holds no other elements.
 * @param {T[]} items
 * @param {(item: T) => any} keyOf
 * @param {(item: T) => {root: Element, update: (item: T) => void}} create
 */
export function keyed(container, items, keyOf, create) {
  const before = rowsOf.get(container) ?? new Map();
  const after = new Map();
  const focused = document.activeElement;
  for (const item of items) {
    const key = keyOf(item);
    if (after.has(key)) continue;
    after.set(key, before.get(key) ?? create(item));
    after.get(key).update(item);
  }
  for (const [key, row] of before) if (!after.has(key)) row.root.remove();
  let next = container.firstElementChild;
  for (const { root } of after.values()) {
    if (next !== null && root === next) next = next.nextElementSibling;
    else container.insertBefore(root, next);
  }
  rowsOf.set(container, after);
  // An element that moves loses the focus.
  if (focused instanceof HTMLElement && focused !== document.activeElement && container.contains(focused)) {
    focused.focus({ preventScroll: true });
  }
}

/** Runs `render` once in the next frame, however often it is asked for. @param {() => void} render */
export function oncePerFrame(render) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      render();
    });
  };
}
