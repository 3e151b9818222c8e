"use strict";
// Recompute targets in the page: composed-shift and finite-candidate-target, as in lightning_weave.maths.
// Model output enters the page as text (textContent), never as markup.

const AGREE_FROM = 0.05; // nats: smaller pulls count as neutral
const MOST_CHANGED = 8;
const NEAREST = 4; // forecasts that one between them is interpolated from
const TOO_FAR = 0.75; // from the nearest forecast: in weights, and half as much in doublings of alpha
const HIDDEN = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g; // not shown as they are

function decode(base64, Type) {
  const raw = atob(base64);
  const bytes = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) bytes[i] = raw.charCodeAt(i);
  return new Type(bytes.buffer);
}

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text.replace(HIDDEN, "\ufffd");
  return element;
}

function shown(text) {
  return text.replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/[\u0000-\u001f\u007f]/g, "␀") || "∅";
}

const SVG = new DOMParser().parseFromString("<svg></svg>", "text/html").querySelector("svg").namespaceURI;
const FORECAST = ["accuracy", "accuracy_low", "accuracy_high", "tokens", "tokens_low", "tokens_high"];
const percent = (value) => (100 * value).toFixed(2);
const signed = (value) => (value < 0 ? "−" : "+") + Math.abs(value).toFixed(2);

class Cache {
  constructor(data) {
    Object.assign(this, data);
    this.C = data.candidates;
    this.ids = decode(data.ids, Uint32Array);
    this.sampled = decode(data.sampled, Uint32Array);
    this.logp = decode(data.logp, Float32Array);
    this.other = decode(data.other, Float32Array);
    this.shifts = data.shifts.map((text) => decode(text, Float32Array));
    this.mapped = data.mapped.map((text) => decode(text, Uint8Array));
    this.valid = data.valid.map((text) => decode(text, Uint8Array));
    this.rules = data.rules.map((rules) => rules.map(({ rule, changed }) => ({ rule, changed: decode(changed, Uint8Array) })));
    this.students = {};
    this.colours = data.colours || {}; // of each setting's policy
    this.forecasts = data.forecasts || [];
    for (const [name, student] of Object.entries(data.students)) {
      this.students[name] = { logp: decode(student.logp, Float32Array), mass: decode(student.mass, Float32Array) };
    }
    let start = 0;
    this.threads = data.threads.map((thread) => ({ ...thread, start, end: (start += thread.shown) }));
    this.logFloor = Math.log(data.floor);
  }

  // with_other: the candidates' log-probabilities and that of all other tokens, floored.
  behaviour(p) {
    const logB = new Float64Array(this.C + 1);
    for (let c = 0; c < this.C; c++) logB[c] = this.logp[p * this.C + c];
    logB[this.C] = Math.max(this.other[p], this.logFloor);
    return logB;
  }

  // The rules of an anchor that change its shift at a position, silence it or mask it.
  rulesAt(p, k) {
    return this.rules[k].filter(({ changed }) => changed[p]).map(({ rule }) => rule);
  }

  ruled(p, weights) {
    return this.anchors.some((_, k) => weights[k] !== 0 && this.rulesAt(p, k).length);
  }

  isSilent(p, k) {
    return this.valid[k][p] && !this.mapped[k].subarray(p * this.C, (p + 1) * this.C).some(Boolean);
  }

  // compose_shifts: null if an anchor with a weight cannot score the position, or all of them are silent there.
  shift(p, weights) {
    const r = new Float64Array(this.C), used = this.anchors.map((_, k) => k).filter((k) => weights[k] !== 0);
    if (used.length && used.every((k) => this.isSilent(p, k))) return null;
    for (const k of used) {
      if (!this.valid[k][p]) return null;
      for (let c = 0; c < this.C; c++) r[c] += weights[k] * this.shifts[k][p * this.C + c];
    }
    return r;
  }

  // tilted_target: the residual is floored after normalising, without normalising again.
  target(logB, r, alpha) {
    const logQ = Float64Array.from(logB, (value, o) => value + (o < this.C ? r[o] / alpha : 0));
    const most = Math.max(...logQ);
    let total = 0;
    for (const value of logQ) total += Math.exp(value - most);
    const normaliser = most + Math.log(total);
    for (let o = 0; o < logQ.length; o++) logQ[o] -= normaliser;
    logQ[this.C] = Math.max(logQ[this.C], this.logFloor);
    return logQ;
  }

  // A pull is a shift minus its mean under the behaviour policy; its sign is the direction of the probability.
  pulls(p, k, logB) {
    const values = new Float64Array(this.C + 1);
    let mass = 0, mean = 0;
    for (let o = 0; o <= this.C; o++) {
      values[o] = o < this.C ? this.shifts[k][p * this.C + o] : 0;
      mass += Math.exp(logB[o]);
      mean += Math.exp(logB[o]) * values[o];
    }
    return values.map((value) => value - mean / mass);
  }

  // What the target is worth: of the nearest forecasts, the nearer the more. Only the weights over alpha matter.
  forecast(weights, alpha) {
    const total = weights.reduce((sum, weight) => sum + Math.abs(weight), 0);
    if (!total) return null;
    const near = this.forecasts.map((one) => {
      const own = one.weights.reduce((sum, weight) => sum + Math.abs(weight), 0);
      const apart = weights.reduce((sum, weight, k) => sum + Math.abs(weight / total - one.weights[k] / own), 0);
      return [apart + Math.abs(Math.log2(alpha / total / (one.alpha / own))) / 2, one];
    }).sort((a, b) => a[0] - b[0]).slice(0, NEAREST);
    if (!near.length || near[0][0] > TOO_FAR) return null;
    const exact = near[0][0] < 1e-6, found = { trusted: true };
    const shares = near.map(([distance], i) => (exact ? Number(i === 0) : distance ** -3));
    const sum = shares.reduce((one, two) => one + two, 0);
    near.forEach(([, one], i) => {
      if (!shares[i]) return;
      found.trusted = found.trusted && one.trusted;
      for (const key of FORECAST) found[key] = (found[key] || 0) + (shares[i] / sum) * one[key];
    });
    return found;
  }

  sampledPlace(p) {
    for (let c = 0; c < this.C; c++) if (this.ids[p * this.C + c] === this.sampled[p]) return c;
    return this.C;
  }

  weave(p, weights, alpha) {
    const r = this.shift(p, weights);
    if (r === null) return null;
    const logB = this.behaviour(p), logQ = this.target(logB, r, alpha);
    let kl = 0;
    for (let o = 0; o <= this.C; o++) kl += Math.exp(logQ[o]) * (logQ[o] - logB[o]);
    const place = this.sampledPlace(p);
    return { logB, logQ, kl, rise: logQ[place] - logB[place] };
  }

  // Whether the weighted anchors pull an outcome in the same direction: 1 agree, -1 conflict, 0 neutral.
  sides(p, weights, outcome) {
    const logB = this.behaviour(p);
    const sizes = [];
    for (let k = 0; k < weights.length; k++) {
      if (weights[k] !== 0 && this.valid[k][p]) sizes.push(this.pulls(p, k, logB)[outcome]);
    }
    const strong = sizes.filter((size) => Math.abs(size) >= AGREE_FROM);
    if (strong.length < 2) return 0;
    if (strong.some((size) => size > 0) && strong.some((size) => size < 0)) return -1;
    return strong.length === sizes.length ? 1 : 0;
  }

  correlation(p, one, two) {
    const logB = this.behaviour(p), u = this.pulls(p, one, logB), v = this.pulls(p, two, logB);
    let uv = 0, uu = 0, vv = 0;
    for (let o = 0; o <= this.C; o++) {
      const b = Math.exp(logB[o]);
      uv += b * u[o] * v[o]; uu += b * u[o] * u[o]; vv += b * v[o] * v[o];
    }
    return uu > 0 && vv > 0 ? uv / Math.sqrt(uu * vv) : NaN;
  }
}

class Loom {
  constructor(root, cache, name) {
    this.root = root; this.cache = cache; this.name = name;
    this.thread = 0; this.place = 0; this.waiting = false;
    this.chooseSetting(cache.start);
    root.replaceChildren(this.controls(), this.readout(), this.body());
    this.scale = this.colourScale();
    this.showThread(0);
  }

  chooseSetting(name) {
    const setting = this.cache.settings.find((other) => other.name === name);
    this.weights = [...setting.weights]; this.alpha = setting.alpha; this.setting = name; this.policy = setting.policy;
  }

  // The colour scale is set once, so that colours stay comparable when a slider moves.
  colourScale() {
    const kls = this.all().filter(Boolean).map((decision) => decision.kl).sort((a, b) => a - b);
    return Math.max(kls.length ? kls[Math.floor(0.95 * (kls.length - 1))] : 0, 0.01);
  }

  all() {
    const last = this.cache.threads[this.cache.threads.length - 1].end;
    return Array.from({ length: last }, (_, p) => this.cache.weave(p, this.weights, this.alpha));
  }

  controls() {
    const box = make("div", "loom-controls"), left = make("div"), right = make("div");
    left.append(this.labelled("Trajectory", this.threadPicker()), this.labelled("Composition", this.settingPicker()));
    left.append(make("p", "caption", "“trained” is the student trained on the selected composition; the sliders do not change it."));
    if (this.cache.forecasts.length) left.append(this.forecastBox());
    right.append(make("span", "loom-label", "Weights and alpha"));
    const weights = this.cache.settings.flatMap((setting) => setting.weights);
    const most = Math.max(1, ...weights), least = Math.min(0, ...weights);
    this.sliders = this.cache.anchors.map((anchor, k) => this.slider(anchor, most, 0.01, (value) => this.setWeight(k, value), least));
    this.alphaSlider = this.slider("alpha", 3, 0.01, (value) => { this.alpha = Number((2 ** value).toFixed(3)); }, -3);
    right.append(...this.sliders.map((slider) => slider.box));
    if (this.cache.anchors.length > 1) right.append(this.sumBox());
    right.append(this.alphaSlider.box, this.recipeBox());
    box.append(left, right);
    this.showSliders();
    return box;
  }

  labelled(text, row) {
    const part = make("div"), label = make("label", "", text);
    label.htmlFor = row.querySelector("select").id;
    part.append(label, row);
    return part;
  }

  threadPicker() {
    const row = make("div", "loom-row");
    this.threadSelect = make("select", "thread");
    this.threadSelect.id = this.name + "-thread";
    this.cache.threads.forEach((thread, index) => {
      const cut = thread.shown < thread.tokens ? `first ${thread.shown.toLocaleString("en")} of ` : "";
      this.threadSelect.add(new Option(`${thread.name} · ${cut}${thread.tokens.toLocaleString("en")} tokens`, index));
    });
    this.threadSelect.addEventListener("change", () => this.showThread(Number(this.threadSelect.value)));
    const step = (by, text, label) => {
      const button = make("button", "", text);
      button.type = "button"; button.ariaLabel = label;
      button.addEventListener("click", () => this.showThread((this.thread + by + this.cache.threads.length) % this.cache.threads.length));
      return button;
    };
    row.append(step(-1, "←", "previous trajectory"), this.threadSelect, step(1, "→", "next trajectory"));
    return row;
  }

  settingPicker() {
    const row = make("div", "loom-row");
    this.settingSelect = make("select", "setting");
    this.settingSelect.id = this.name + "-setting";
    for (const { name, weights, alpha } of this.cache.settings) {
      const parts = this.cache.anchors.map((anchor, k) => [anchor, weights[k]]).filter(([, weight]) => weight !== 0);
      const sum = parts.map(([anchor, weight]) => `${Number(weight.toFixed(3))} ${anchor}`).join(" + ");
      this.settingSelect.add(new Option(`${name} · ${sum}, alpha ${Number(alpha.toPrecision(4))}`, name));
    }
    this.settingSelect.value = this.setting;
    this.settingSelect.addEventListener("change", () => {
      this.chooseSetting(this.settingSelect.value);
      this.showSliders();
      this.recolour();
    });
    row.append(this.settingSelect);
    return row;
  }

  slider(name, most, step, change, least = 0) {
    const box = make("div", "slider"), label = make("label", "", name);
    const input = make("input"), output = make("output");
    input.type = "range"; input.min = least; input.max = most; input.step = step;
    input.id = `${this.name}-${name}-${this.cache.anchors.indexOf(name)}`; label.htmlFor = input.id;
    input.dataset.name = name;
    input.addEventListener("input", () => { change(Number(input.value)); this.showSliders(input); this.soon(); });
    box.append(label, input, output);
    return { box, input, output };
  }

  sumBox() {
    const box = make("div", "sum"), label = make("label", "", "keep the sum of the weights");
    this.keepSum = make("input");
    this.keepSum.type = "checkbox"; this.keepSum.checked = true; this.keepSum.id = this.name + "-sum";
    label.htmlFor = this.keepSum.id;
    box.append(this.keepSum, label);
    return box;
  }

  // Forecasts as hollow marks, and that of the sliders with its interval.
  forecastBox() {
    const box = make("div", "forecast"), edge = 12, width = 360, height = 170;
    const draw = (tag, attributes) => {
      const element = document.createElementNS(SVG, tag);
      for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
      return element;
    };
    const axis = (key, from, to) => {
      const values = this.cache.forecasts.map((one) => one[key]);
      const least = Math.min(...values), span = Math.max(...values) - least || 1;
      const place = (value) => from + ((value - least) / span) * (to - from);
      return (value) => Math.min(Math.max(place(value), Math.min(from, to) - edge / 2), Math.max(from, to) + edge / 2);
    };
    this.forecastX = axis("tokens", edge, width - edge);
    this.forecastY = axis("accuracy", height - edge, edge);
    const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "Forecasts: accuracy against tokens" });
    for (const one of this.cache.forecasts) {
      const mark = draw("circle", { cx: this.forecastX(one.tokens), cy: this.forecastY(one.accuracy), r: 3.5, class: one.trusted ? "hollow" : "hollow untrusted" });
      const title = draw("title", {});
      title.textContent = `${one.policy}: ${this.forecastText(one)}`;
      mark.append(title);
      picture.append(mark);
    }
    this.forecastBars = [draw("line", { class: "bar" }), draw("line", { class: "bar" })];
    this.forecastMark = draw("circle", { r: 5, class: "here" });
    picture.append(...this.forecastBars, this.forecastMark);
    this.forecastLine = make("output", "forecast-line");
    const caption = "Forecast of this target from the cache; 95 % interval. Up: more accurate, left: fewer tokens.";
    box.append(make("span", "loom-label", caption), this.forecastLine, picture);
    return box;
  }

  forecastText(one) {
    const range = (key, digits) => `${one[key].toFixed(digits)} [${one[key + "_low"].toFixed(digits)}, ${one[key + "_high"].toFixed(digits)}]`;
    return `${range("accuracy", 1)} % in ${range("tokens", 1)} tokens${one.trusted ? "" : " (not trusted)"}`;
  }

  showForecast() {
    if (!this.forecastLine) return;
    const one = this.cache.forecast(this.weights, this.alpha);
    this.forecastLine.textContent = one ? this.forecastText(one) : "no forecast near these weights";
    for (const element of [this.forecastMark, ...this.forecastBars]) element.style.display = one ? "" : "none";
    if (!one) return;
    const place = (element, values) => { for (const [key, value] of Object.entries(values)) element.setAttribute(key, value.toFixed(2)); };
    const x = this.forecastX(one.tokens), y = this.forecastY(one.accuracy);
    place(this.forecastMark, { cx: x, cy: y });
    place(this.forecastBars[0], { x1: this.forecastX(one.tokens_low), x2: this.forecastX(one.tokens_high), y1: y, y2: y });
    place(this.forecastBars[1], { x1: x, x2: x, y1: this.forecastY(one.accuracy_low), y2: this.forecastY(one.accuracy_high) });
  }

  // The lines of a recipe that train on what the sliders show.
  recipeBox() {
    const box = make("div", "recipe-lines"), button = make("button", "copy", "Copy as composition");
    this.lines = make("pre", "composition");
    this.lines.tabIndex = 0;
    button.type = "button";
    button.addEventListener("click", () => {
      const range = document.createRange();
      range.selectNodeContents(this.lines);
      getSelection().removeAllRanges();
      getSelection().addRange(range);
      const copied = document.execCommand("copy"); // works in pages that are opened from disk
      button.textContent = copied ? "Copied" : "Selected: press Ctrl+C";
      setTimeout(() => { button.textContent = "Copy as composition"; }, 2000);
    });
    box.append(button, this.lines);
    return box;
  }

  composition() {
    const key = (name) => (/^[\w-]+$/.test(name) ? name : JSON.stringify(name));
    const number = (value) => Number(value.toFixed(4)).toString();
    const used = this.cache.anchors.map((anchor, k) => [anchor, Number(number(this.weights[k]))]).filter(([, weight]) => weight !== 0);
    const total = used.reduce((sum, [, weight]) => sum + weight, 0), exact = Math.abs(total - 1) < 1e-6;
    const weights = used.map(([anchor, weight]) => `${key(anchor)} = ${number(weight)}`).join(", ");
    return `[compositions.NAME]\nweights = { ${weights} }\nalpha = ${number(this.alpha)}\n${exact ? "" : "normalize = false\n"}`;
  }

  setWeight(k, value) {
    const total = this.weights.reduce((sum, weight) => sum + weight, 0);
    const rest = total - this.weights[k], left = Math.max(total - value, 0);
    if (this.keepSum && this.keepSum.checked && total > 0) {
      const others = this.weights.length - 1;
      value = Math.min(value, total);
      this.weights = this.weights.map((weight, j) => (j === k ? value : rest > 0 ? (weight * left) / rest : left / others));
    } else {
      this.weights[k] = value;
    }
    this.weights = this.weights.map((weight) => Number(weight.toFixed(6)));
  }

  showSliders(held) {
    this.sliders.forEach((slider, k) => {
      if (slider.input !== held) slider.input.value = this.weights[k];
      slider.output.textContent = this.weights[k].toFixed(2);
    });
    if (this.alphaSlider.input !== held) this.alphaSlider.input.value = Math.log2(this.alpha);
    this.alphaSlider.output.textContent = this.alpha.toFixed(2);
    this.alphaSlider.input.ariaValueText = this.alpha.toFixed(2);
    this.lines.textContent = this.composition();
    this.showForecast();
  }

  soon() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => { this.waiting = false; this.recolour(); });
  }

  readout() {
    const box = make("div", "readout");
    const cell = (name, text) => {
      const part = make("div"), output = make("output", name);
      part.append(make("span", "", text), output);
      box.append(part);
      return output;
    };
    this.meanKl = cell("mean-kl", "mean KL of this response, nats");
    this.allKl = cell("all-kl", `mean KL of all ${this.cache.threads.length} responses, nats`);
    this.kept = cell("kept", "decisions kept");
    if (this.cache.rules.some((rules) => rules.length)) this.ruled = cell("ruled", "decisions changed by a rule");
    if (this.cache.anchors.length > 1) this.conflicts = cell("conflicts", "sampled tokens in conflict");
    return box;
  }

  body() {
    const box = make("div", "loom-body"), left = make("div");
    this.prompt = make("div", "prompt");
    this.text = make("div", "weave");
    Object.assign(this.text, { tabIndex: 0, role: "listbox", ariaLabel: "Response, token by token" });
    this.text.addEventListener("keydown", (event) => this.key(event));
    this.text.addEventListener("click", (event) => {
      if (event.target.dataset.place !== undefined) this.choose(Number(event.target.dataset.place));
    });
    this.changed = make("div", "changed");
    this.decision = make("div", "decision");
    left.append(this.prompt, this.text, this.legend(), this.changed);
    box.append(left, this.decision);
    return box;
  }

  legend() {
    const box = make("div", "legend");
    const ramp = (side, text) => {
      const part = make("span", "", text);
      part.append(make("i", "ramp " + side));
      return part;
    };
    const sample = (side, text) => {
      const part = make("span");
      part.append(make("i", "t " + side, "abc"), document.createTextNode(" " + text));
      return part;
    };
    box.append(ramp("up", "raised by the target"), ramp("down", "lowered by the target"), sample("off", "masked: not trained on"));
    if (this.cache.rules.some((rules) => rules.length)) box.append(sample("ruled", "changed by a rule of an anchor"));
    if (this.cache.anchors.length > 1) box.append(sample("agree", "anchors agree"), sample("conflict", "anchors in conflict"));
    return box;
  }

  showThread(index) {
    this.thread = index; this.place = 0;
    const thread = this.cache.threads[index];
    this.threadSelect.value = index;
    const prompt = make("pre", "", thread.prompt);
    this.prompt.replaceChildren("Prompt", prompt);
    this.tokens = [];
    for (let p = thread.start; p < thread.end; p++) {
      const text = this.cache.texts[this.cache.sampled[p]];
      const token = make("span", "t", text.includes("\n") ? text.replace(/\n/g, "↵\n") : text.trim() ? text : text.replace(/ /g, "\u00b7") || "∅");
      token.role = "option"; token.id = `${this.name}-token-${p - thread.start}`; token.dataset.place = p - thread.start;
      this.tokens.push(token);
    }
    this.text.replaceChildren(...this.tokens);
    if (thread.shown < thread.tokens) {
      this.text.append(make("span", "omitted", ` [${(thread.tokens - thread.shown).toLocaleString("en")} more tokens are not on this page]`));
    }
    this.recolour();
    const kls = this.decisions.map((decision) => (decision ? decision.kl : -1));
    this.choose(kls.indexOf(Math.max(...kls)), false);
  }

  recolour() {
    const thread = this.cache.threads[this.thread], { cache, weights } = this;
    const everything = this.all();
    this.decisions = everything.slice(thread.start, thread.end);
    let conflicts = 0, compared = 0, ruled = 0;
    this.tokens.forEach((token, i) => {
      const decision = this.decisions[i];
      token.classList.toggle("off", decision === null);
      ruled += token.classList.toggle("ruled", cache.ruled(thread.start + i, weights));
      const side = decision ? cache.sides(thread.start + i, weights, cache.sampledPlace(thread.start + i)) : 0;
      token.classList.toggle("agree", side > 0);
      token.classList.toggle("conflict", side < 0);
      conflicts += side < 0; compared += side !== 0;
      const strength = decision ? Math.min(Math.sqrt(decision.kl / this.scale), 1) * 0.85 : 0;
      token.style.backgroundColor = decision ? `rgba(var(--${decision.rise >= 0 ? "up" : "down"}), ${strength.toFixed(3)})` : "";
    });
    const mean = (list) => (list.length ? (list.reduce((sum, decision) => sum + decision.kl, 0) / list.length).toFixed(4) : "–");
    const here = this.decisions.filter(Boolean);
    this.meanKl.textContent = mean(here);
    this.allKl.textContent = mean(everything.filter(Boolean));
    this.kept.textContent = `${here.length} of ${this.decisions.length}`;
    if (this.ruled) this.ruled.textContent = `${ruled} of ${this.decisions.length}`;
    if (this.conflicts) this.conflicts.textContent = compared ? `${conflicts} of ${compared}` : "–";
    this.showChanged();
    this.showDecision();
  }

  showChanged() {
    const start = this.cache.threads[this.thread].start;
    const order = this.decisions.map((decision, i) => [decision ? decision.kl : -1, i]).filter(([kl]) => kl >= 0).sort((a, b) => b[0] - a[0]);
    const list = make("ol");
    for (const [kl, i] of order.slice(0, MOST_CHANGED)) {
      const item = make("li"), button = make("button"), text = this.cache.texts[this.cache.sampled[start + i]];
      button.type = "button";
      button.append(make("code", "", shown(text)), make("small", "", kl.toFixed(4)));
      button.addEventListener("click", () => this.choose(i));
      item.append(button);
      list.append(item);
    }
    this.changed.replaceChildren(make("span", "loom-label", "Largest changes: KL between target and student, nats"), list);
  }

  key(event) {
    const last = this.tokens.length - 1;
    const moves = { ArrowRight: this.place + 1, ArrowLeft: this.place - 1, ArrowDown: this.below(1), ArrowUp: this.below(-1), Home: 0, End: last };
    if (!(event.key in moves)) return;
    event.preventDefault();
    this.choose(Math.min(Math.max(moves[event.key], 0), last));
  }

  // The nearest token above or below on the screen.
  below(way) {
    const from = this.tokens[this.place].getBoundingClientRect();
    let best = this.place, nearest = Infinity;
    for (let i = this.place + way; i >= 0 && i < this.tokens.length; i += way) {
      const box = this.tokens[i].getBoundingClientRect();
      const down = way * (box.top - from.top);
      if (down < 4) continue;
      if (down > 2.5 * from.height && nearest < Infinity) break;
      const distance = down * 10 + Math.abs(box.left - from.left);
      if (distance < nearest) { nearest = distance; best = i; }
    }
    return best;
  }

  choose(place, scroll = true) {
    this.tokens[this.place].ariaSelected = null;
    this.place = Math.max(place, 0);
    const token = this.tokens[this.place];
    token.ariaSelected = "true";
    this.text.setAttribute("aria-activedescendant", token.id);
    if (scroll) token.scrollIntoView({ block: "nearest" });
    this.showDecision();
  }

  showDecision() {
    const { cache, weights } = this, thread = cache.threads[this.thread], p = thread.start + this.place;
    const decision = this.decisions[this.place], logB = cache.behaviour(p), student = cache.students[this.policy];
    const title = make("h3", "", "Decision ");
    title.append(`${this.place + 1} of ${thread.tokens}: `, make("code", "", shown(cache.texts[cache.sampled[p]])));
    const table = make("table"), head = make("tr");
    const titles = ["token", "student, %", ...cache.anchors.map((anchor) => anchor + " shift"), "target, %"];
    if (student) titles.push("trained, %");
    titles.forEach((text) => { const cell = make("th", "", text); cell.scope = "col"; head.append(cell); });
    table.createTHead().append(head);
    const rows = table.createTBody();
    for (let o = 0; o <= cache.C; o++) rows.append(this.candidateRow(p, o, decision, logB, student));
    if (cache.colours[this.setting]) rows.style.setProperty("--own", cache.colours[this.setting]);
    const split = cache.anchors.length > 1 ? "≠ the anchors pull this candidate in opposite directions. " : "";
    const legend = make("p", "caption", "◂ sampled. " + split + "Shifts in nats.");
    const wrap = make("div", "scroll");
    wrap.append(table);
    this.decision.replaceChildren(title, this.badges(p, decision, weights), wrap, legend);
  }

  badges(p, decision, weights) {
    const { cache } = this, box = make("div", "badges");
    const add = (text, side) => box.append(make("span", side, text));
    if (decision) add(`KL ${decision.kl.toFixed(4)} nats`, "kl");
    const unable = cache.anchors.filter((_, k) => weights[k] !== 0 && !cache.valid[k][p] && !cache.rulesAt(p, k).length);
    if (unable.length) add(`masked: ${unable.join(" and ")} cannot score every candidate`, "");
    cache.anchors.forEach((anchor, k) => {
      const what = cache.isSilent(p, k) ? "silenced" : cache.valid[k][p] ? "changed" : "masked";
      if (weights[k] !== 0) for (const rule of cache.rulesAt(p, k)) add(`${anchor}: ${what} by ${rule}`, "ruled");
    });
    const side = decision ? cache.sides(p, weights, cache.sampledPlace(p)) : 0;
    if (side) add(side > 0 ? "anchors agree on this token" : "anchors in conflict on this token", side > 0 ? "agree" : "conflict");
    const scoring = cache.anchors.map((_, k) => k).filter((k) => cache.valid[k][p]);
    for (const i of scoring) for (const j of scoring) {
      const value = i < j ? cache.correlation(p, i, j) : NaN;
      const pair = cache.anchors.length > 2 ? `${cache.anchors[i]}, ${cache.anchors[j]}: ` : "";
      if (!Number.isNaN(value)) add(`${pair}correlation ${signed(value)}`, "");
    }
    return box;
  }

  candidateRow(p, o, decision, logB, student) {
    const { cache, weights } = this, row = make("tr"), last = o === cache.C, at = p * cache.C + o;
    const name = make("th", "", last ? "other" : shown(cache.texts[cache.ids[at]]));
    name.scope = "row";
    if (cache.sampledPlace(p) === o) row.className = "sampled";
    if (decision && cache.sides(p, weights, o) < 0) name.append(make("span", "split", " ≠"));
    row.append(name);
    const add = (kind, value) => {
      const cell = make("td", kind, value === null ? "–" : percent(value));
      if (value !== null) cell.style.setProperty("--fill", `${Math.min(100 * value, 100).toFixed(1)}%`);
      row.append(cell);
    };
    add("p", Math.exp(logB[o]));
    cache.anchors.forEach((_, k) => {
      const known = !last && cache.mapped[k][at];
      const value = known ? cache.shifts[k][at] : 0;
      row.append(make("td", known ? (value >= 0 ? "r up" : "r down") : "r none", known ? signed(value) : last ? "0" : "–"));
    });
    add("q", decision ? Math.exp(decision.logQ[o]) : null);
    if (student) add("s", last ? Math.max(1 - student.mass[p], 0) : Math.exp(student.logp[at]));
    return row;
  }
}

document.querySelectorAll(".loom").forEach((root, index) => {
  const data = JSON.parse(document.getElementById(root.dataset.source).textContent);
  new Loom(root, new Cache(data), "loom-" + index);
});
