// Shows what vision tokens say: click a patch, move through the layers, see where a word lights up.
class LensView {
  constructor(root, data) {
    this.data = data; this.token = 0; this.layer = data.layers.length - 1; this.reading = data.readings.length > 1 ? 1 : 0; this.word = null;
    for (const reading of data.readings) {
      reading.topNumbers = new Int32Array(bytes(reading.top).buffer);
      reading.chances = new Float32Array(bytes(reading.chance).buffer);
      reading.mapBytes = reading.maps ? bytes(reading.maps) : null;
    }
    const look = make("section", { class: "look", "aria-label": "Image" });
    this.card = make("section", { class: "card", "aria-label": "What the patch says" });
    root.append(make("div", { class: "lens" }, look, make("div", { class: "read" }, this.card)));
    this.stage = new Stage(look, data.images, data.grids);
    this.stage.lines = true;
    this.stage.parts.forEach(({ stage }, image) => stage.addEventListener("click", (event) => {
      const box = stage.getBoundingClientRect(), { w, h } = data.images[image];
      const token = this.stage.at(image, ((event.clientX - box.left) / box.width) * w, ((event.clientY - box.top) / box.height) * h, this.views.value || null);
      if (token !== null) { this.token = token; this.show(); }
    }));
    const views = [...new Set(data.grids.map((grid) => grid.view))];
    this.views = make("select", { class: "quiet", "aria-label": "Which tokens are shown", onchange: () => this.show() },
      ...views.map((view) => make("option", { value: view }, view === "tile" ? "tiles" : view)));
    this.views.hidden = views.length < 2;
    this.slider = make("input", { type: "range", id: "layer", min: 0, max: data.layers.length - 1, step: 1, value: this.layer,
      oninput: () => { this.layer = Number(this.slider.value); this.show(); } });
    this.layerName = make("output", { for: "layer" });
    this.kinds = make("div", { class: "row", role: "group", "aria-label": "Vocabulary" }, ...data.readings.map((reading, i) =>
      make("button", { type: "button", class: "quiet", onclick: () => { this.reading = i; this.word = null; this.show(); } }, reading.name)));
    this.words = make("div", { class: "words", role: "group", "aria-label": "Heat map of a word" });
    this.where = make("p", { class: "where", role: "status", "aria-live": "polite" });
    look.append(make("div", { class: "row" }, make("label", { for: "layer" }, "Layer"), this.slider, this.layerName, this.views), this.kinds, this.words, this.where);
    for (const note of [...data.notes, ...(data.reason ? [`Patches cannot be shown: ${data.reason}`] : [])]) look.append(make("p", { class: "note" }, note));
    document.addEventListener("keydown", (event) => this.key(event));
    const grid = data.grids[0];
    if (grid) this.token = grid.first + Math.floor(grid.rows / 2) * (grid.columns + grid.gap) + Math.floor(grid.columns / 2);
    this.show();
  }

  says(layer, token, k) { // [text, probability] number k
    const reading = this.data.readings[this.reading], at = (layer * this.data.tokens + token) * reading.k + k;
    return [reading.entries[reading.topNumbers[at]], reading.chances[at]];
  }

  show() {
    const reading = this.data.readings[this.reading];
    this.layerName.textContent = `${this.data.layers[this.layer]} of ${this.data.depth}`;
    this.slider.value = this.layer;
    [...this.kinds.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === this.reading)));
    const place = this.stage.point(this.token), view = this.views.value || null;
    if (this.word === null && reading.words.length) this.word = 0;
    this.words.replaceChildren(...reading.words.map((word, i) => make("button", { type: "button", class: "quiet", "aria-pressed": String(i === this.word),
      onclick: () => { this.word = i === this.word ? -1 : i; this.show(); } }, word)));
    if (this.word !== null && this.word >= 0 && reading.mapBytes) {
      const across = reading.words.length, start = this.layer * this.data.tokens;
      this.stage.paint((token) => reading.mapBytes[(start + token) * across + this.word] / 255, view);
    } else { // how sure each patch is
      this.stage.paint((token) => reading.chances[(this.layer * this.data.tokens + token) * reading.k], view);
    }
    const spot = place ? `row ${place.row + 1}, column ${place.column + 1}${place.grid.view !== "image" ? ` (${place.grid.view})` : ""}` : `vision token ${this.token}`;
    const [text, p] = this.says(this.layer, this.token, 0);
    this.where.replaceChildren(make("b", {}, visible(text.trim())), ` (${percent(p)} %) is what the patch at ${spot} says most at layer ${this.data.layers[this.layer]}.`);
    this.table(reading, spot);
  }

  table(reading, spot) {
    const rows = [];
    for (let layer = this.data.layers.length - 1; layer >= 0; layer--) {
      const cells = [];
      for (let k = 0; k < reading.k; k++) {
        const [text, p] = this.says(layer, this.token, k);
        cells.push(make("td", {}, visible(text.trim() || text), " ", make("span", { class: "p" }, percent(p))));
      }
      rows.push(make("tr", { class: layer === this.layer ? "now" : null, onclick: () => { this.layer = layer; this.show(); } }, make("th", { scope: "row" }, String(this.data.layers[layer])), ...cells));
    }
    this.card.replaceChildren(make("h2", {}, `The patch at ${spot}, layer by layer, over ${reading.name} (%)`), make("div", { class: "scroll", tabindex: "0" }, make("table", { class: "says" }, make("tbody", {}, ...rows))));
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const place = this.stage.locate(this.token);
    const move = (rows, columns) => {
      if (!place) return;
      const row = place.row + rows, column = place.column + columns;
      if (row < 0 || row >= place.grid.rows || column < 0 || column >= place.grid.columns) return;
      event.preventDefault();
      this.token = place.grid.first + row * (place.grid.columns + place.grid.gap) + column;
      this.show();
    };
    const layer = (by) => { this.layer = Math.max(0, Math.min(this.data.layers.length - 1, this.layer + by)); this.show(); };
    switch (event.key) {
      case "ArrowLeft": return move(0, -1);
      case "ArrowRight": return move(0, 1);
      case "ArrowUp": return move(-1, 0);
      case "ArrowDown": return move(1, 0);
      case "[": return layer(-1);
      case "]": return layer(1);
    }
  }
}
