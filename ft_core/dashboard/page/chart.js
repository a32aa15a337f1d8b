// A small chart of points [begin, rate, members] over time: one line, an axis, and what it says in words.
import { clock, duration, number } from "./words.js";

const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 130, TOP = 20, BOTTOM = 18, LEFT = 4, RIGHT = 4;

function draw(parent, kind, attributes, text) {
  const made = document.createElementNS(SVG, kind);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

// The next of 1, 2, 5, 10, 20 ... that is not below a value; of whole numbers, one whose half is whole, too.
function ceiling(value, counts) {
  if (counts) return value <= 20 ? Math.max(2, Math.ceil(value / 2) * 2) : ceiling(value / 2) * 2;
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map(n => n * power).find(n => n >= value * (1 - 1e-9));
}

export class Chart {
  // column: of a point; stepped: the value holds until the next point.
  constructor(name, title, unit, column, stepped) {
    Object.assign(this, { title, unit, column, stepped, points: [], span: 600, every: 1, at: 0, width: 0, cross: null });
    this.root = document.createElement("figure");
    this.root.className = name;
    const caption = document.createElement("figcaption");
    const label = document.createElement("span");
    label.textContent = title;
    this.value = document.createElement("span");
    this.value.className = "num soft";
    caption.append(label, this.value);
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("role", "img");
    this.root.append(caption, this.svg);
    this.svg.addEventListener("pointermove", event => this.point(event));
    this.svg.addEventListener("pointerleave", () => { this.cross = null; this.render(); });
    new ResizeObserver(() => { if (this.svg.clientWidth !== this.width) this.render(); }).observe(this.svg);
  }

  // What is younger than a quarter of the span is not pressed into a corner.
  show(points, span, every, at) {
    const kept = points.filter(p => p[0] > at - span), age = kept.length ? at - kept[0][0] : 0;
    Object.assign(this, { points: kept, span: Math.min(span, Math.max(span / 4, age)), every, at });
    this.render();
  }

  point(event) {
    if (!this.points.length) return;
    const share = (event.clientX - this.svg.getBoundingClientRect().left - LEFT) / Math.max(1, this.width - LEFT - RIGHT);
    const time = this.at - this.span * (1 - share);
    this.cross = this.points.reduce((a, b) => Math.abs(b[0] - time) < Math.abs(a[0] - time) ? b : a)[0];
    this.render();
  }

  render() {
    const { svg, points, span, every, at, column } = this;
    const width = this.width = svg.clientWidth;
    svg.replaceChildren();
    if (!width) return;
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    const values = points.map(p => p[column]), most = Math.max(0, ...values), top = ceiling(most, this.stepped);
    const x = time => LEFT + (width - LEFT - RIGHT) * (1 - Math.min(1, Math.max(0, (at - time) / span)));
    const y = value => TOP + (HEIGHT - TOP - BOTTOM) * (1 - value / top);
    for (const value of [0, top / 2, top]) {
      draw(svg, "line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) });
      if (value) draw(svg, "text", { x: LEFT, y: y(value) - 3 }, number(value));
    }
    for (const [share, anchor] of [[1, "start"], [0.5, "middle"], [0, "end"]]) {
      const time = at - span * share;
      draw(svg, "text", { x: x(time), y: HEIGHT - 4, "text-anchor": anchor }, clock(time, span > 3600));
    }
    for (const run of this.runs()) {
      const last = Math.min(at, run[run.length - 1][0] + every);
      let path = "";
      run.forEach((p, i) => {
        const to = this.stepped && i ? `H${x(p[0]).toFixed(1)}V${y(p[column]).toFixed(1)}`
          : `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[column]).toFixed(1)}`;
        path += to;
      });
      path += `H${x(last).toFixed(1)}`;
      draw(svg, "path", { class: "fill", d: `${path}V${y(0)}H${x(run[0][0]).toFixed(1)}Z` });
      draw(svg, "path", { class: "line", d: path });
    }
    const now = points.length ? points[points.length - 1][column] : undefined;
    const marked = this.cross === null ? undefined : points.find(p => p[0] === this.cross);
    if (marked) {
      draw(svg, "line", { class: "cross", x1: x(marked[0]), x2: x(marked[0]), y1: TOP, y2: HEIGHT - BOTTOM });
      this.value.textContent = `${number(marked[column])} ${this.unit} at ${clock(marked[0], span > 3600)}`;
    } else {
      this.value.textContent = now === undefined ? "nothing yet" : `${number(now)} ${this.unit}`;
    }
    svg.setAttribute("aria-label", now === undefined ? `${this.title}: nothing yet`
      : `${this.title} in the last ${duration(span)}: now ${number(now)}, least ${number(Math.min(...values))}, most ${number(most)}`);
  }

  // Points without a hole between them.
  runs() {
    const runs = [];
    for (const p of this.points) {
      const run = runs[runs.length - 1];
      if (run && p[0] - run[run.length - 1][0] < 2.5 * this.every) run.push(p); else runs.push([p]);
    }
    return runs;
  }
}
