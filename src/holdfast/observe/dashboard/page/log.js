// The log of one worker: pieces of text are appended, and the oldest go when there are too many.

import { element, show } from "./format.js";

const MOST_CHARS = 400_000;

export class LogPane {
  constructor(box, problem, follow) {
    this.box = box;
    this.problem = problem;
    this.follow = follow;
    this.chars = 0;
    box.addEventListener("scroll", () => {
      const isAtEnd = box.scrollTop + box.clientHeight >= box.scrollHeight - 24;
      if (!isAtEnd && this.isByHand) follow.checked = false;
    });
    for (const name of ["wheel", "touchmove", "keydown", "pointerdown"]) {
      box.addEventListener(name, () => (this.isByHand = true), { passive: true });
    }
    follow.addEventListener("change", () => this.toEnd());
  }

  clear() {
    this.box.replaceChildren();
    this.chars = 0;
    show(this.problem, "");
  }

  take(piece) {
    show(this.problem, piece.problem ?? "");
    if (piece.note) this.add(element("span", { class: "mark-line" }, `· ${piece.note}`), piece.note.length);
    if (piece.text) this.add(element("span", {}, piece.text), piece.text.length);
    this.toEnd();
  }

  add(part, chars) {
    this.box.append(part);
    this.chars += chars;
    while (this.chars > MOST_CHARS && this.box.childElementCount > 1) {
      this.chars -= this.box.firstChild.textContent.length;
      this.box.firstChild.remove();
    }
  }

  toEnd() {
    if (!this.follow.checked) return;
    this.isByHand = false;
    this.box.scrollTop = this.box.scrollHeight;
  }
}
