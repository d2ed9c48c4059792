// What a terminal shows after what programs wrote to it: the part of xterm that bash and `ps --watch` use. Anything
// else is an error, so that a picture never shows a guess.

/** @typedef {{ text: string, color: string }} Run Characters of one colour; "" is the usual one. */

const COLORS = new Map([
  [31, "red"],
  [32, "green"],
  [33, "yellow"],
]);
const BLANK = { char: " ", color: "" };
const TAB = 8;
/** A sequence that moves or sets something, a control character, or text. */
const TOKEN = /\x1b\[(?<mode>\??)(?<numbers>[0-9;]*)(?<final>[@-~])|[\x00-\x1a\x1c-\x1f]|[^\x00-\x1f]+/y;
/** The beginning of a sequence whose end has not been written yet. */
const UNFINISHED = /^\x1b(\[\??[0-9;]*)?$/;

export class Terminal {
  /** @param {number} columns @param {number} rows */
  constructor(columns, rows) {
    this.columns = columns;
    this.rows = rows;
    this.color = "";
    this.wraps = true;
    this.hasCursor = true;
    this.pending = "";
    this.screen = this.#blank();
    /** @type {Terminal["screen"] | null} The one that the other hides. */
    this.other = null;
  }

  #blank() {
    return { cells: Array.from({ length: this.rows }, () => this.#line()), row: 0, column: 0 };
  }

  #line() {
    return Array.from({ length: this.columns }, () => BLANK);
  }

  /** @param {string} text */
  write(text) {
    const all = this.pending + text;
    this.pending = "";
    TOKEN.lastIndex = 0;
    while (TOKEN.lastIndex < all.length) {
      const rest = all.slice(TOKEN.lastIndex);
      const token = TOKEN.exec(all);
      if (!token && UNFINISHED.test(rest)) {
        this.pending = rest;
        return;
      }
      if (!token) throw new Error(`this terminal does not know ${JSON.stringify(rest.slice(0, 12))}`);
      if (token.groups?.final) this.#sequence(token[0], token.groups);
      else if (token[0] < " ") this.#control(token[0]);
      else for (const char of token[0]) this.#print(char);
    }
  }

  /** The lines as runs of one colour, without blanks at their ends. @returns {Run[][]} */
  lines() {
    return this.screen.cells.map((cells) => {
      /** @type {Run[]} */
      const runs = [];
      const used = cells.findLastIndex((cell) => cell.char !== " ") + 1;
      for (const { char, color } of cells.slice(0, used)) {
        const last = runs.at(-1);
        // A blank has no colour that could be seen.
        if (last && (last.color === color || char === " ")) last.text += char;
        else runs.push({ text: char, color });
      }
      return runs;
    });
  }

  /** Where the cursor is, unless it is hidden. */
  cursor() {
    const { row, column } = this.screen;
    return this.hasCursor ? { row, column: Math.min(column, this.columns - 1) } : null;
  }

  /** @param {string} char */
  #print(char) {
    const { screen } = this;
    if (screen.column >= this.columns && this.wraps) {
      screen.column = 0;
      this.#feed();
    }
    screen.cells[screen.row][Math.min(screen.column, this.columns - 1)] = { char, color: this.color };
    screen.column = Math.min(screen.column + 1, this.columns);
  }

  #feed() {
    const { screen } = this;
    if (screen.row + 1 < this.rows) screen.row += 1;
    else screen.cells = [...screen.cells.slice(1), this.#line()];
  }

  /** @param {string} char */
  #control(char) {
    const { screen } = this;
    if (char === "\n") this.#feed();
    else if (char === "\r") screen.column = 0;
    else if (char === "\b") screen.column = Math.max(0, Math.min(screen.column, this.columns - 1) - 1);
    else if (char === "\t") screen.column = Math.min(this.columns - 1, (Math.floor(screen.column / TAB) + 1) * TAB);
    else if (char !== "\x07") throw new Error(`this terminal does not know ${JSON.stringify(char)}`);
  }

  /** @param {string} text @param {Record<string, string>} parts */
  #sequence(text, { mode, numbers, final }) {
    const values = numbers.split(";").map(Number);
    const { screen } = this;
    const column = Math.min(screen.column, this.columns - 1);
    if (mode && (final === "h" || final === "l")) this.#setMode(text, values[0], final === "h");
    else if (final === "m") values.forEach((value) => (this.color = COLORS.get(value) ?? ""));
    else if (final === "K" && values[0] === 0) this.#clear(screen.row, column);
    else if (final === "J" && values[0] === 0) {
      this.#clear(screen.row, column);
      for (let row = screen.row + 1; row < this.rows; row += 1) this.#clear(row, 0);
    } else if (final === "J" && values[0] === 2) screen.cells = this.#blank().cells;
    // 3 forgets what has scrolled away, which this terminal does anyway.
    else if (final === "J" && values[0] === 3) return;
    else if (final === "H") {
      screen.row = Math.min(this.rows, Math.max(1, values[0])) - 1;
      screen.column = Math.min(this.columns, Math.max(1, values[1] ?? 1)) - 1;
    } else throw new Error(`this terminal does not know ${JSON.stringify(text)}`);
  }

  /** @param {string} text @param {number} mode @param {boolean} on */
  #setMode(text, mode, on) {
    if (mode === 7) this.wraps = on;
    else if (mode === 25) this.hasCursor = on;
    else if (mode === 1049) {
      const main = this.other ?? this.screen;
      this.screen = on ? this.#blank() : main;
      this.other = on ? main : null;
      // 2004 is how the shell is told that text is pasted.
    } else if (mode !== 2004) throw new Error(`this terminal does not know ${JSON.stringify(text)}`);
  }

  /** @param {number} row @param {number} from A column. */
  #clear(row, from) {
    this.screen.cells[row].fill(BLANK, from);
  }
}
