// Shows the predictions of vision tokens: click a patch, move through the layers, see the heat map of a word.
class LensView {
  constructor(root, data) {
    this.data = data; this.token = 0; this.layer = data.layers.length - 1; this.reading = data.readings.length > 1 ? 1 : 0; this.word = null;
    for (const reading of data.readings) {
      reading.topNumbers = new Int32Array(bytes(reading.top).buffer);
      reading.chances = new Float32Array(bytes(reading.chance).buffer);
      reading.mapBytes = reading.maps ? bytes(reading.maps) : null;
    }
    const look = make("section", { class: "look", "aria-label": "Image" });
    this.card = make("section", { class: "card", "aria-label": "What the patch predicts" });
    root.append(make("div", { class: "lens" }, look, make("div", { class: "read" }, this.card)));
    this.stage = new Stage(look, data.images, data.grids);
    this.stage.lines = true;
    this.stage.parts.forEach(({ stage }, image) => stage.addEventListener("click", (event) => {
      const token = this.stage.at(image, event, this.views.value || null);
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
      make("button", { type: "button", class: "quiet", onclick: () => { this.reading = i; this.word = this.strongestWord(); this.show(); } }, reading.name)));
    this.words = make("div", { class: "words", role: "group", "aria-label": "Heat map of a word" });
    this.where = make("p", { class: "where", role: "status", "aria-live": "polite" });
    this.scale = make("span");
    look.append(make("div", { class: "row" }, make("label", { for: "layer" }, "Layer"), this.slider, this.layerName, this.stage.imageButton, this.views), this.kinds, this.words,
      make("p", { class: "legend" }, this.scale, "0 %", make("i"), "100 %"), this.where);
    for (const note of [...data.notes, ...(data.reason ? [`Patches are not available: ${data.reason}`] : [])]) look.append(make("p", { class: "note" }, note));
    document.addEventListener("keydown", (event) => this.key(event));
    const grid = data.grids[0];
    if (grid) this.token = grid.first + Math.floor(grid.rows / 2) * (grid.columns + grid.gap) + Math.floor(grid.columns / 2);
    this.word = this.strongestWord();
    if (this.word >= 0) this.token = this.bestToken(); // map, patch and sentence start with the same word
    this.show();
  }

  share(token, word = this.word) { // the share of a word in a patch at the chosen layer
    const reading = this.data.readings[this.reading];
    return reading.mapBytes[(this.layer * this.data.tokens + token) * reading.words.length + word] / 255;
  }

  strongestWord() { // the word with the largest share in any patch; -1 without words
    const peaks = this.data.readings[this.reading].words.map((_, word) => this.share(this.bestToken(word), word));
    return peaks.indexOf(Math.max(...peaks));
  }

  exactShare(token) { // the share of the chosen word in %: exact if it is among the likeliest, or else from the map, which has one byte per share
    const { k, words } = this.data.readings[this.reading];
    for (let at = 0; at < k; at++) { const [text, p] = this.entry(this.layer, token, at); if (text === words[this.word]) return percent(p); }
    return this.share(token) > 0 ? percent(this.share(token)) : "<0.2";
  }

  bestToken(word = this.word) { // the vision token with the largest share of a word
    let best = 0;
    for (let token = 1; token < this.data.tokens; token++) if (this.share(token, word) > this.share(best, word)) best = token;
    return best;
  }

  entry(layer, token, k) { // [text, probability] of the k-th likeliest entry
    const reading = this.data.readings[this.reading], at = (layer * this.data.tokens + token) * reading.k + k;
    return [reading.entries[reading.topNumbers[at]], reading.chances[at]];
  }

  show() {
    const reading = this.data.readings[this.reading];
    this.layerName.textContent = `${this.data.layers[this.layer]} of ${this.data.depth}`;
    this.slider.value = this.layer;
    [...this.kinds.children].forEach((button, i) => button.setAttribute("aria-pressed", String(i === this.reading)));
    this.stage.point(this.token);
    const view = this.views.value || null, mapped = this.word >= 0;
    this.words.replaceChildren(...reading.words.map((word, i) => make("button", { type: "button", class: "quiet", "aria-pressed": String(i === this.word),
      onclick: () => { this.word = i === this.word ? -1 : i; this.show(); } }, word, make("small", {}, ` ${Math.round(100 * this.share(this.bestToken(i), i))} %`))));
    this.scale.textContent = mapped ? `share of “${reading.words[this.word]}” in a patch:` : "probability of each patch's likeliest token:";
    this.stage.paint(mapped ? (token) => this.share(token) : (token) => this.entry(this.layer, token, 0)[1], view);
    this.tell(reading, mapped);
    this.table(reading);
  }

  patch(token) { return this.stage.spot(token) ? `the patch at ${this.stage.spot(token)}` : `vision token ${token}`; }

  tell(reading, mapped) { // describe the patch and, if a map is shown, its word
    const [text, p] = this.entry(this.layer, this.token, 0), most = make("b", {}, visible(text.trim())), layer = ` at layer ${this.data.layers[this.layer]}`;
    if (!mapped) return this.where.replaceChildren(most, ` (${percent(p)} %) is the likeliest token of ${this.patch(this.token)}${layer}.`);
    const word = reading.words[this.word], best = this.bestToken(), here = this.share(this.token), parts = [make("b", {}, word)];
    parts.push(` has ${this.exactShare(this.token)} % of ${this.patch(this.token)}${layer}`);
    if (text !== word) parts.push(", where ", most, ` is likeliest (${percent(p)} %)`);
    parts.push(here >= this.share(best) ? "; no patch has more of it." : "; most of it is at ");
    if (here < this.share(best)) parts.push(make("button", { type: "button", class: "quiet", onclick: () => { this.token = best; this.show(); } }, this.stage.spot(best) || `vision token ${best}`), ` (${this.exactShare(best)} %).`);
    this.where.replaceChildren(...parts);
  }

  table(reading) {
    const rows = [];
    for (let layer = this.data.layers.length - 1; layer >= 0; layer--) {
      const cells = [];
      for (let k = 0; k < reading.k; k++) {
        const [text, p] = this.entry(layer, this.token, k);
        cells.push(make("td", { class: p < 0.01 ? "faint" : null }, visible(text.trim() || text), " ", make("span", { class: "p" }, percent(p))));
      }
      rows.push(make("tr", { class: layer === this.layer ? "now" : null, onclick: () => { this.layer = layer; this.show(); } }, make("th", { scope: "row" }, String(this.data.layers[layer])), ...cells));
    }
    this.card.replaceChildren(make("h2", {}, `${this.patch(this.token).replace(/^./, (first) => first.toUpperCase())}, layer by layer, in %`),
      make("p", { class: "sub" }, reading.words.length ? `Shares among these ${reading.entries.length} words only; they add up to 100 % even if a patch shows none of them.` : "Probabilities over the whole vocabulary of the model."),
      make("div", { class: "scroll", tabindex: "0" }, make("table", { class: "predictions" }, make("tbody", {}, ...rows))));
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
      case "o": return this.stage.bare();
    }
  }
}
