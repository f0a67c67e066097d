// The samples of an evaluation: a list with filters, and one sample with the answers of all methods side by side.
const SHOWN = 10000; // characters of a text; browsers take seconds to break longer ones into lines
const clip = (text) => !text || text.length <= SHOWN ? text : `${text.slice(0, SHOWN)}… (${(text.length - SHOWN).toLocaleString("en")} more characters)`;

class SampleBrowser {
  constructor(root, data) {
    this.data = data; this.now = -1; this.kept = []; this.drawn = 0;
    const option = (value, text) => make("option", { value }, text);
    const changed = () => this.filter();
    this.benchmark = make("select", { id: "benchmark", "aria-label": "Benchmark", onchange: changed }, option("", "All benchmarks"), ...data.benchmarks.map((name) => option(name, name)));
    this.benchmark.hidden = data.benchmarks.length < 2;
    const several = new Set(data.columns.map((column) => column.model)).size > 1;
    const short = data.columns.map((column) => (several ? `${column.model} · ${column.name}` : column.name));
    this.names = short.map((name, c) => (short.indexOf(name) === short.lastIndexOf(name) ? name : `${name} (${data.columns[c].settings || "defaults"})`));
    this.wrong = make("select", { id: "wrong", "aria-label": "Which method is wrong", onchange: changed }, option("", "Right or wrong"),
      ...this.names.flatMap((name, c) => [option(`${c}`, `${name} is wrong`), option(`${c}only`, `only ${name} is wrong`)]));
    this.questions = {}; // the different questions of each benchmark
    data.samples.forEach((sample) => (this.questions[sample.b] ??= new Set()).add(sample.q));
    this.disagree = make("input", { type: "checkbox", id: "disagree", onchange: changed });
    this.text = make("input", { type: "search", id: "text", placeholder: "Search questions and answers", "aria-label": "Search", oninput: () => { clearTimeout(this.timer); this.timer = setTimeout(changed, 120); } });
    this.count = make("p", { class: "count", role: "status", "aria-live": "polite" });
    this.list = make("ul", { class: "list", "aria-label": "Samples" });
    this.list.addEventListener("scroll", () => { if (this.list.scrollTop + this.list.clientHeight > this.list.scrollHeight - 400) this.more(); });
    this.detail = make("section", { class: "detail", "aria-label": "Sample" });
    root.append(...data.notes.map((note) => make("p", { class: "notice" }, note)), this.totals(), make("div", { class: "samples" }, make("div", { class: "side" },
      make("div", { class: "filters" }, this.benchmark, make("label", {}, this.disagree, "methods disagree"), this.wrong, this.text, this.count),
      this.dots(), this.list), this.detail));
    document.addEventListener("keydown", (event) => this.key(event));
    window.addEventListener("hashchange", () => this.restore());
    this.restore();
  }

  totals() { // the score of every method on every benchmark; clicking a score shows the samples that failed
    const { totals } = this.data, names = Object.keys(totals);
    const axis = (benchmark) => { const every = Object.values(totals[benchmark].of).flatMap((total) => total.at || []); return [Math.min(...every), Math.max(...every)]; };
    const cell = (benchmark, c) => {
      const total = totals[benchmark].of[c];
      if (!total) return make("td", {}, "–");
      if (total.open) return make("td", {}, make("span", { class: "dot open" }), ` ${total.open} answers`);
      const score = make("button", { type: "button", class: `score${total.best ? " best" : ""}`, "aria-label": `${this.names[c]}, ${benchmark}: ${totals[benchmark].metric} ${total.text}. Show the samples that failed.`,
        onclick: () => { this.benchmark.value = this.data.benchmarks.includes(benchmark) ? benchmark : ""; this.wrong.value = String(c); this.filter(); } }, total.text);
      const [low, high] = axis(benchmark), [value, from = value, to = value] = total.at;
      if (total.at.length) {
        score.prepend(make("i", { "aria-hidden": "true" }));
        score.title = `${total.text}, 95 % interval ${from.toFixed(1)} to ${to.toFixed(1)}`;
        for (const [name, x] of Object.entries({ v: value, l: from, h: to })) score.style.setProperty(`--${name}`, high > low ? (x - low) / (high - low) : 0.5);
      }
      return make("td", {}, score);
    };
    const head = (benchmark) => { // the ends of the axis, and the direction of better scores
      const { metric } = totals[benchmark], [low, high] = axis(benchmark), ends = Number.isFinite(low) ? ` ${low.toFixed(1)} to ${high.toFixed(1)}` : "";
      return make("th", { scope: "col" }, benchmark, " ", make("small", {}, metric.replace(/ [↑↓]$/, ""), ends, metric.endsWith("↓") ? ", ← better" : metric.endsWith("↑") ? ", better →" : ""));
    };
    return make("div", { class: "totals", tabindex: "0", role: "region", "aria-label": "Scores" }, make("table", {},
      make("thead", {}, make("tr", {}, make("th", { scope: "col" }, "Method"), ...names.map(head))),
      make("tbody", {}, ...this.names.map((name, c) => make("tr", {}, make("th", { scope: "row", title: this.data.columns[c].settings || null }, name), ...names.map((benchmark) => cell(benchmark, c)))))));
  }

  dots() { // the legend of the dots at the right of each row
    const every = this.data.samples.flatMap((sample) => this.methods(sample).map((c) => this.state(sample.a[c])[0]));
    const shown = [["dot", "right"], ["dot bad", "wrong"], ["dot unscored", "not scored"], ["dot open", "not answered"]].filter(([kind]) => every.includes(kind));
    return make("p", { class: "notes" }, `At the right of each row: ${this.names.join(", ")} (`, ...shown.flatMap(([kind, text], k) => [k ? ", " : "", make("span", { class: kind }), ` ${text}`]), ").");
  }

  methods(sample) { // the columns that answer this sample
    return Object.keys((this.data.totals[sample.b] || { of: sample.a }).of).map(Number);
  }

  matches(sample, wanted) {
    if (wanted.benchmark && sample.b !== wanted.benchmark) return false;
    if (wanted.disagree && !sample.d) return false;
    if (wanted.wrong !== "") {
      const column = parseInt(wanted.wrong, 10), answer = sample.a[column];
      if (!answer || !answer.bad) return false;
      if (wanted.wrong.endsWith("only") && Object.entries(sample.a).some(([c, other]) => Number(c) !== column && other.bad)) return false;
    }
    return !wanted.text || `${sample.i} ${sample.q} ${sample.t || ""} ${Object.values(sample.a).map((answer) => answer.x).join(" ")}`.toLowerCase().includes(wanted.text);
  }

  filter() {
    const wanted = { benchmark: this.benchmark.value, disagree: this.disagree.checked, wrong: this.wrong.value, text: this.text.value.trim().toLowerCase() };
    const shown = this.kept[this.now];
    this.kept = [];
    this.data.samples.forEach((sample, number) => { if (this.matches(sample, wanted)) this.kept.push(number); });
    this.count.textContent = `${this.kept.length.toLocaleString("en")} of ${this.data.samples.length.toLocaleString("en")} samples, ordered by id`;
    this.list.replaceChildren(); this.drawn = 0; this.now = -1;
    this.more();
    if (this.kept.length) return this.select(Math.max(0, this.kept.indexOf(shown)));
    this.remember("");
    this.detail.replaceChildren(make("p", {}, "No sample matches these filters."));
  }

  remember(sample) { // put the sample and the filters into the address, so that a link shows the same
    const { value: text } = this.text, named = { sample, benchmark: this.benchmark.value, disagree: this.disagree.checked ? "1" : "", wrong: this.wrong.value, text };
    const address = `#${new URLSearchParams(Object.entries(named).filter(([, value]) => value))}`;
    if (window.location.hash !== address) try { window.history.replaceState(null, "", address); } catch (error) { /* not allowed in a frame */ }
  }

  restore() { // show the sample and the filters in the address
    const named = new URLSearchParams(window.location.hash.slice(1));
    for (const name of ["benchmark", "wrong", "text"]) { this[name].value = named.get(name) || ""; if (this[name].value !== (named.get(name) || "")) this[name].value = ""; }
    this.disagree.checked = window.location.hash ? named.get("disagree") === "1" : this.data.samples.some(({ d }) => d);
    const at = this.data.samples.findIndex(({ b, i }) => `${b}:${i}` === named.get("sample"));
    this.kept = at >= 0 ? [at] : []; this.now = 0;
    this.filter();
  }

  more() { // add rows to the list as the reader scrolls
    const end = Math.min(this.kept.length, this.drawn + 150);
    for (; this.drawn < end; this.drawn++) {
      const at = this.drawn, sample = this.data.samples[this.kept[at]];
      const dots = this.methods(sample).map((c) => this.dot(sample.a[c], `${this.names[c]}: `));
      this.list.append(make("li", {}, make("button", { type: "button", onclick: () => this.select(at) }, make("span", { class: "id" }, this.data.benchmarks.length > 1 ? `${sample.b} ${sample.i}` : sample.i),
        make("span", { class: "what" }, ((this.questions[sample.b].size === 1 && sample.t) || sample.q || "").slice(0, 200)), ...dots)));
    }
  }

  select(at) {
    if (at < 0 || at >= this.kept.length) return;
    while (this.drawn <= at) this.more();
    if (this.now >= 0 && this.list.children[this.now]) this.list.children[this.now].firstChild.removeAttribute("aria-current");
    this.now = at;
    const row = this.list.children[at].firstChild;
    row.setAttribute("aria-current", "true");
    row.scrollIntoView({ block: "nearest" });
    const sample = this.data.samples[this.kept[at]];
    this.remember(`${sample.b}:${sample.i}`);
    this.show(sample);
  }

  show(sample) {
    const facts = make("div", { class: "facts" }, make("h2", {}, `${sample.b} · ${sample.i}`), make("p", {}, clip(sample.q) || "The question is not known."));
    if (sample.t) facts.append(make("p", { class: "truth" }, "Truth: ", make("b", {}, clip(sample.t))));
    if (sample.cmd) facts.append(make("details", {}, make("summary", {}, "See these answers token by token: run this command"), make("code", { class: "command" }, sample.cmd)));
    const columns = this.methods(sample).map((c) => this.column(this.names[c], this.data.columns[c].settings, sample.a[c]));
    const time = (k) => (sample.s && sample.s[k] !== null ? seconds(sample.s[k]) : null);
    const images = sample.p.map((src, k) => make("a", { href: src, target: "_blank", title: "Open the image alone" },
      make("img", { src, alt: time(k) ? `Frame at ${time(k)}` : `Image ${sample.p.length > 1 ? `${k + 1} ` : ""}of the sample` }), time(k)));
    this.detail.replaceChildren(make("div", { class: sample.s ? "images frames" : "images" }, ...images), make("div", {}, facts, make("div", { class: "columns" }, ...columns)));
    this.detail.scrollTop = 0;
  }

  state(answer) { // [mark, verdict]
    if (!answer) return ["dot open", "not answered"];
    return answer.v ? [answer.bad ? "dot bad" : "dot", answer.v] : ["dot unscored", "not scored"];
  }

  dot(answer, name) {
    const [kind, verdict] = this.state(answer);
    return make("span", { class: kind, title: name + verdict, role: "img", "aria-label": name + verdict });
  }

  column(name, settings, answer) {
    const [kind, verdict] = this.state(answer);
    const head = [make("h3", {}, name, make("span", { class: "chip" }, make("span", { class: kind }), ` ${verdict}`)), settings ? make("p", { class: "scores" }, settings) : null];
    if (!answer) return make("article", { class: "column" }, ...head);
    const parts = [];
    let at = 0;
    const text = clip(answer.x);
    for (const [start, end] of (answer.w || []).filter(([, end]) => end <= SHOWN)) { parts.push(text.slice(at, start), make("mark", { title: "not in the image" }, text.slice(start, end))); at = end; }
    parts.push(text.slice(at));
    return make("article", { class: `column${answer.bad ? " bad" : ""}` }, ...head, make("p", {}, ...parts), answer.c ? make("p", { class: "scores" }, `${answer.c} of ${answer.n} steps changed`) : null);
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, select, textarea")) return;
    const move = { ArrowDown: 1, j: 1, ArrowUp: -1, k: -1 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.select(this.now + move);
  }
}
