"use strict";
// Shows a decode: an image with its patches, answers token by token, and the candidates of one step.
// `new Viewer(root, data)` draws it; `addStep` and `finish` let an answer grow while it is being made.

const STOPS = [[20, 14, 54], [106, 23, 110], [187, 55, 84], [237, 105, 37], [252, 181, 25], [252, 255, 164]];

function make(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") node.className = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function bytes(base64) {
  const text = atob(base64);
  const out = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) out[i] = text.charCodeAt(i);
  return out;
}

function heatColor(t) {
  const at = Math.max(0, Math.min(0.9999, t)) * (STOPS.length - 1);
  const k = Math.floor(at), f = at - k;
  const mix = STOPS[k].map((v, i) => Math.round(v + (STOPS[k + 1][i] - v) * f));
  return `rgba(${mix.join(",")},${(0.3 + 0.42 * t).toFixed(3)})`;
}

function percent(p) {
  if (p === null || p === undefined) return "–";
  const v = 100 * p;
  if (v > 0 && v < 0.01) return "<0.01";
  return v >= 10 ? v.toFixed(1) : v.toFixed(2);
}

const visible = (text) => text.replace(/\n/g, "⏎") || "·";
const number = (x) => (x === null || x === undefined ? "–" : Math.abs(x) < 0.001 && x !== 0 ? x.toExponential(1) : x.toFixed(3));

// Images with a heat map and a highlighted patch; coordinates are pixels of the original image.
class Stage {
  constructor(root, images, grids) {
    this.images = images; this.grids = grids; this.heat = true; this.lines = false; this.values = null; this.view = null;
    this.frames = make("div", { class: "frames" });
    this.parts = images.map((image, i) => {
      const spot = make("div", { class: "spot", hidden: true });
      const canvas = make("canvas", { "aria-hidden": "true" });
      const stage = make("div", { class: "stage" },
        make("img", { src: image.src, alt: images.length > 1 ? `Image ${i + 1}` : "The image that was asked about" }), canvas, spot);
      stage.style.aspectRatio = `${image.w} / ${image.h}`;
      this.frames.append(make("figure", { class: "frame" }, stage));
      return { stage, canvas, spot };
    });
    root.append(this.frames);
    this.fit();
    this.watch = new ResizeObserver(() => { this.fit(); this.draw(); });
    this.watch.observe(this.frames);
  }

  fit() { // the largest size that neither the column nor the window cuts off
    const narrow = window.innerWidth <= 760;
    const high = narrow ? 0.36 * window.innerHeight : Math.max(220, window.innerHeight - 330) / Math.min(2, this.images.length);
    this.images.forEach((image, i) => {
      const wide = this.frames.clientWidth || 400;
      this.parts[i].stage.style.width = `${Math.round(Math.min(wide, (high * image.w) / image.h))}px`;
    });
  }

  locate(index) { // {grid, row, column} of a vision token, or null
    for (const grid of this.grids) {
      const offset = index - grid.first, across = grid.columns + grid.gap;
      if (offset < 0 || offset >= grid.rows * across) continue;
      const row = Math.floor(offset / across), column = offset % across;
      return column < grid.columns ? { grid, row, column } : null;
    }
    return null;
  }

  at(image, x, y, view) { // the vision token under a point of an image
    for (const grid of this.grids) {
      if (grid.image !== image || (view && grid.view !== view)) continue;
      const column = grid.xs.findIndex(([a, b]) => x >= a && x < b), row = grid.ys.findIndex(([a, b]) => y >= a && y < b);
      if (column >= 0 && row >= 0) return grid.first + row * (grid.columns + grid.gap) + column;
    }
    return null;
  }

  box(image, x0, y0, x1, y1) {
    const { w, h } = this.images[image];
    const clip = (v, top) => Math.max(0, Math.min(top, v));
    return [clip(x0, w) / w, clip(y0, h) / h, clip(x1, w) / w, clip(y1, h) / h];
  }

  point(index) { // highlight one vision token; returns its place
    this.parts.forEach(({ spot }) => { spot.hidden = true; });
    const place = index === null || index === undefined ? null : this.locate(index);
    if (!place) return null;
    const { grid, row, column } = place;
    const [x0, x1] = grid.xs[column], [y0, y1] = grid.ys[row];
    const [a, b, c, d] = this.box(grid.image, x0, y0, x1, y1);
    const spot = this.parts[grid.image].spot;
    Object.assign(spot.style, {
      left: `${100 * a}%`, top: `${100 * b}%`, width: `${100 * (c - a)}%`, height: `${100 * (d - b)}%`,
    });
    spot.dataset.token = index;
    spot.hidden = false;
    return place;
  }

  paint(values, view) { // values: token -> 0..1, or null
    this.values = values; this.view = view; this.draw();
  }

  draw() {
    const ratio = window.devicePixelRatio || 1;
    this.parts.forEach(({ stage, canvas }, image) => {
      const w = Math.round(stage.clientWidth * ratio), h = Math.round(stage.clientHeight * ratio);
      if (canvas.width !== w || canvas.height !== h) { canvas.width = w; canvas.height = h; }
      const pen = canvas.getContext("2d");
      pen.clearRect(0, 0, w, h);
      stage.classList.toggle("heated", Boolean(this.heat && this.values)); // greyed, so that the heat map's colours can be read
      for (const grid of this.grids) {
        if (grid.image !== image || (this.view && grid.view !== this.view)) continue;
        for (let r = 0; r < grid.rows; r++) for (let c = 0; c < grid.columns; c++) {
          const [x0, y0, x1, y1] = this.box(image, grid.xs[c][0], grid.ys[r][0], grid.xs[c][1], grid.ys[r][1]);
          if (x1 <= x0 || y1 <= y0) continue;
          const left = Math.round(x0 * w), top = Math.round(y0 * h);
          const rect = [left, top, Math.round(x1 * w) - left, Math.round(y1 * h) - top];
          if (this.heat && this.values) {
            const value = this.values(grid.first + r * (grid.columns + grid.gap) + c);
            if (value !== null) { pen.fillStyle = heatColor(value); pen.fillRect(...rect); }
          }
          if (this.lines) {
            pen.strokeStyle = "rgba(255,255,255,.55)"; pen.lineWidth = Math.max(1, ratio / 2);
            pen.strokeRect(rect[0] + .5, rect[1] + .5, rect[2], rect[3]);
          }
        }
      }
    });
  }
}

class Viewer {
  constructor(root, data) {
    this.data = data; this.now = null; this.pinned = null; this.cards = [];
    this.data.answers.forEach((answer) => { answer.bytes = answer.maps ? bytes(answer.maps) : new Uint8Array(0); });
    const look = make("section", { class: "look", "aria-label": "Image" });
    this.answersBox = make("div", { class: "answers" });
    this.why = make("section", { class: "why", "aria-label": "Candidates at this step" });
    this.said = make("p", { class: "sr", role: "status", "aria-live": "polite" });
    root.append(make("div", { class: "viewer" }, look, make("div", { class: "read" }, this.answersBox, this.why, this.said,
      make("p", { class: "keys" }, make("kbd", {}, "←"), " ", make("kbd", {}, "→"), " step   ", make("kbd", {}, "↑"), " ",
        make("kbd", {}, "↓"), " answer   ", make("kbd", {}, "n"), " ", make("kbd", {}, "p"), " next, previous change   ",
        make("kbd", {}, "h"), " heat map   ", make("kbd", {}, "g"), " patch grid"))));
    this.stage = new Stage(look, data.images, data.grids);
    this.heatButton = make("button", { class: "quiet", type: "button", "aria-pressed": "true", onclick: () => this.toggle("heat") }, "Heat map");
    this.gridButton = make("button", { class: "quiet", type: "button", "aria-pressed": "false", onclick: () => this.toggle("lines") }, "Patches");
    const views = [...new Set(data.grids.map((grid) => grid.view))];
    this.viewSelect = make("select", { class: "quiet", "aria-label": "Which tokens the heat map shows", onchange: () => this.show() },
      make("option", { value: "" }, "view of the speaker"), ...views.map((view) => make("option", { value: view }, view === "tile" ? "tiles" : view)));
    this.viewSelect.hidden = views.length < 2;
    this.where = make("p", { class: "where" });
    look.append(make("div", { class: "tools" }, this.heatButton, this.gridButton, this.viewSelect), this.where,
      make("div", { class: "legend" }, "disagrees", make("i"), "agrees with the next word"));
    if (data.reason) look.append(make("p", { class: "note" }, `Patches cannot be shown: ${data.reason}`));
    data.answers.forEach((_, i) => this.addCard(i));
    this.life = new AbortController();
    this.follow = true; // the newest token of the first answer is shown, until the reader picks one
    document.addEventListener("keydown", (event) => this.key(event), { signal: this.life.signal });
    this.first();
  }

  dispose() { this.life.abort(); this.stage.watch.disconnect(); }

  first() { // begin where the method mattered most
    let best = null, most = -1;
    this.data.answers.forEach((answer, a) => answer.steps.forEach((step, s) => {
      const weight = (step.was !== undefined ? 1 : 0) + (step.v || 0) + (step.i !== undefined ? 1e-6 : 0);
      if (weight > most) { most = weight; best = [a, s]; }
    }));
    return best ? this.select(...best, true, false) : this.show();
  }

  addCard(i) {
    const answer = this.data.answers[i];
    const facts = make("span", { class: "facts" });
    const tokens = make("div", { class: "tokens", role: "group", "aria-label": `Answer of ${answer.label}; arrow keys walk its tokens` });
    const strip = make("div", { class: "strip", "aria-hidden": "true" });
    const changes = make("ol", { class: "changes", "aria-label": "Where the best token changed" });
    const card = make("article", { class: "answer" }, make("header", {}, make("h2", {}, answer.label), facts), tokens, strip, changes);
    this.answersBox.append(card);
    this.cards[i] = { card, facts, tokens, strip, changes, buttons: [], bars: [] };
    strip.addEventListener("click", (event) => {
      const at = this.cards[i].bars.indexOf(event.target);
      if (at >= 0) this.select(i, at, true);
    });
    answer.steps.forEach((_, s) => this.addToken(i, s));
    this.count(i);
  }

  addToken(i, s) {
    const step = this.data.answers[i].steps[s], card = this.cards[i];
    const changed = step.was !== undefined;
    const special = /^\s*<.*>\s*$/.test(step.t);
    const button = make("button", {
      type: "button", class: `tok${changed ? " changed" : ""}${step.x ? " differs" : ""}${special ? " special" : ""}`,
      "aria-pressed": "false", tabindex: "-1",
      "aria-label": `${step.t.trim() || "blank"}, step ${s + 1}${changed ? `, instead of ${step.was.trim()}` : ""}${step.x ? ", differs from the other answer" : ""}`,
      onclick: () => { this.follow = false; this.select(i, s, true); }, onmouseenter: () => this.select(i, s, false),
      onmouseleave: () => { if (this.pinned) this.select(...this.pinned, false); },
      onfocus: () => this.select(i, s, true, false),
    }, step.t.trim() || (step.t.includes("\n") ? "⏎" : step.t ? "␣" : "·"));
    button.style.setProperty("--shift", (step.v || 0).toFixed(3));
    // Blanks stand between the buttons, so that lines break where the text would.
    const lead = /^\s*/.exec(step.t)[0], breaks = (step.t.match(/\n/g) || []).length;
    card.tokens.append(lead && step.t.trim() ? lead.replace(/\n/g, "") || " " : "", button, ...Array.from({ length: breaks }, () => make("br")));
    card.buttons.push(button);
    const bar = make("i", { class: changed ? "changed" : "", title: `step ${s + 1}: ${step.t.trim()}` });
    bar.style.setProperty("--shift", (step.v || 0).toFixed(3));
    card.strip.append(bar);
    card.bars.push(bar);
    if (changed) card.changes.append(make("li", {}, make("button", { type: "button", onclick: () => this.select(i, s, true) },
      make("span", { class: "n" }, String(s + 1)), " ", visible(step.t.trim()), " ", make("s", {}, visible(step.was.trim())))));
    return button;
  }

  count(i) {
    const { steps, seconds } = this.data.answers[i], card = this.cards[i];
    const changed = steps.filter((step) => step.was !== undefined).length;
    const detailed = steps.some((step) => step.c);
    card.facts.textContent = `${steps.length} token${steps.length === 1 ? "" : "s"}` + (detailed ? `, ${changed} changed` : "") + (seconds ? `, ${seconds.toFixed(2)} s` : "");
    card.strip.hidden = !steps.some((step) => step.v > 0.0005);
    card.changes.hidden = !changed;
  }

  addStep(i, step, map) { // an answer grows
    const answer = this.data.answers[i];
    if (map) {
      const row = bytes(map), all = new Uint8Array(answer.bytes.length + row.length);
      all.set(answer.bytes); all.set(row, answer.bytes.length);
      step.m = answer.bytes.length / row.length;
      answer.bytes = all;
    }
    answer.steps.push(step);
    this.addToken(i, answer.steps.length - 1);
    this.count(i);
    if (this.follow && i === 0) this.select(i, answer.steps.length - 1, true, false);
  }

  differences(all) { // steps of each answer that the others do not share
    all.forEach((steps, i) => steps.forEach((s) => { this.data.answers[i].steps[s].x = 1; this.cards[i].buttons[s].classList.add("differs"); }));
  }

  finish(i, seconds, text) {
    Object.assign(this.data.answers[i], { seconds, text });
    this.count(i);
  }

  toggle(what) {
    this.stage[what] = !this.stage[what];
    (what === "heat" ? this.heatButton : this.gridButton).setAttribute("aria-pressed", String(this.stage[what]));
    this.stage.draw();
  }

  step() { return this.now ? this.data.answers[this.now[0]].steps[this.now[1]] : null; }

  select(i, s, pin, focus = pin) {
    const steps = this.data.answers[i].steps;
    if (!steps.length) return;
    s = Math.max(0, Math.min(steps.length - 1, s));
    if (this.now) this.mark(...this.now, false);
    this.now = [i, s];
    if (pin) this.pinned = [i, s];
    this.mark(i, s, true);
    if (focus && document.activeElement !== this.cards[i].buttons[s]) this.cards[i].buttons[s].focus({ preventScroll: false });
    this.show();
  }

  mark(i, s, on) {
    const card = this.cards[i], button = card.buttons[s];
    button.setAttribute("aria-pressed", String(on));
    button.tabIndex = on ? 0 : -1;
    card.bars[s].classList.toggle("now", on);
    card.card.classList.toggle("current", on);
  }

  show() {
    const step = this.step();
    this.why.hidden = !step || !step.c;
    if (!step) { this.where.textContent = ""; return; }
    const [i, s] = this.now, answer = this.data.answers[i];
    const place = this.stage.point(step.i);
    const view = this.viewSelect.value || (place || { grid: this.data.grids[0] || { view: null } }).grid.view;
    if (step.m !== undefined && answer.n) {
      const start = step.m * answer.n, map = answer.bytes;
      this.stage.paint((token) => { const close = 1 - map[start + token] / 255; return answer.far ? 1 - close : close; }, view);
    } else this.stage.paint(null, view);
    this.tell(step, place);
    if (step.c) this.candidates(answer, step, s);
  }

  tell(step, place) {
    this.where.replaceChildren();
    if (step.i === undefined) {
      this.where.append(step.c && step.k === 1 ? "Only one token was plausible here: nothing to decide." : "No patch spoke at this step.");
    } else {
      const many = this.data.images.length > 1 && place ? `image ${place.grid.image + 1}, ` : "";
      const part = place && place.grid.view !== "image" ? `${place.grid.view}, ` : "";
      const spot = place ? `${many}${part}row ${place.row + 1}, column ${place.column + 1}` : null;
      this.where.append(make("b", {}, visible(step.t.trim())), ` was spoken with ${spot ? `the patch at ${spot}` : `vision token ${step.i}, which lies nowhere on the image`}; layer ${step.l}, divergence ${number(step.d)}.`);
    }
    this.said.textContent = `${step.t.trim()}. ${this.where.textContent}`;
  }

  candidates(answer, step, s) {
    const alone = step.c.reduce((best, entry, at) => (entry[1] > step.c[best][1] ? at : best), 0);
    const rows = step.c.map(([text, base, vision, final], at) => {
      const cell = (kind, p) => {
        const bar = make("div", { class: `bar ${kind}${p === null ? " none" : ""}` }, percent(p));
        bar.style.setProperty("--p", p || 0);
        return make("td", {}, bar);
      };
      const kind = [at === step.o ? "chosen" : "", at === alone && step.was !== undefined ? "alone" : ""].join(" ").trim();
      return make("tr", { class: kind || null }, make("td", { title: JSON.stringify(text) }, visible(text)), cell("base", base), cell("vision", vision), cell("final", final));
    });
    const middle = step.i !== undefined ? "vision token, %" : "contrast, %";
    this.why.replaceChildren(
      make("h2", {}, `Step ${s + 1}: “${visible(step.t.trim())}”`, ...(step.was !== undefined ? [` instead of “${visible(step.was.trim())}”`] : [])),
      make("p", { class: "sub" }, `${answer.label} · ${step.k} plausible token${step.k === 1 ? "" : "s"}` + (step.c.length < step.k ? `, the best ${step.c.length} shown` : "")),
      make("table", { class: "cands" }, make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "token"), make("th", { scope: "col" }, "model, %"),
        make("th", { scope: "col" }, middle), make("th", { scope: "col" }, "after, %"))), make("tbody", {}, ...rows)));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !this.now) return;
    if (event.target.closest && event.target.closest("input, select, textarea, [contenteditable]")) return;
    const [i, s] = this.now, answers = this.data.answers;
    const go = (a, b) => { event.preventDefault(); this.follow = false; this.select(a, b, true); };
    const change = (way) => {
      for (let at = s + way; at >= 0 && at < answers[i].steps.length; at += way) if (answers[i].steps[at].was !== undefined) return go(i, at);
    };
    switch (event.key) {
      case "ArrowLeft": return go(i, s - 1);
      case "ArrowRight": return go(i, s + 1);
      case "ArrowUp": if (i > 0 && answers[i - 1].steps.length) go(i - 1, s); return;
      case "ArrowDown": if (i + 1 < answers.length && answers[i + 1].steps.length) go(i + 1, s); return;
      case "Home": return go(i, 0);
      case "End": return go(i, answers[i].steps.length - 1);
      case "n": return change(1);
      case "p": return change(-1);
      case "h": return this.toggle("heat");
      case "g": return this.toggle("lines");
    }
  }
}

function themeButton() { // light, dark, or what the system says
  const root = document.documentElement;
  return make("button", { type: "button", class: "quiet", onclick: () => {
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
  } }, "Light / dark");
}
