// One room as elements. They are made once and changed in place, so that focus and selection stay where they are.
// What comes from the job is only ever set as text.
import { Chart } from "./chart.js";
import { bytes, clock, duration, integer, number, several } from "./words.js";

const FILTER_FROM = 13;   // replicas, from which on there is a filter
const ROWS_MAX = 200;     // rows that are shown at once; the filter finds the others
const COLUMNS = [["Replica"], ["State"], ["Step", 1], ["Steps/s", 1], ["Version", 1], ["Lease age", 1], ["Address"]];
const SPANS = { fine: [600, 1, "10 minutes"], coarse: [86400, 60, "24 hours"] };

export function make(kind, attributes = {}, ...children) {
  const made = document.createElement(kind);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") made.addEventListener(name, value); else made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

function show(element, visible) {
  if (element.hidden === visible) element.hidden = !visible;
}

// A table keeps its roles when the narrow layout makes blocks of its rows.
function table(label, columns) {
  const head = make("tr", { role: "row" });
  for (const [text, right] of columns) head.append(make("th", { role: "columnheader", scope: "col", ...(right ? { class: "num" } : {}) }, text));
  const body = make("tbody", { role: "rowgroup" });
  return [make("table", { role: "table", "aria-label": label }, make("thead", { role: "rowgroup" }, head), body), body];
}

function cell(label, right, ...children) {
  return make("td", { role: "cell", "data-label": label, ...(right ? { class: "num" } : {}) }, ...children);
}

// One replica's row.
class Row {
  constructor(room, id, act) {
    this.name = make("span");
    this.nameMore = make("small");
    this.state = make("span");
    this.told = make("small");
    this.progress = make("progress", { "aria-label": `${id} receives state` });
    this.cells = COLUMNS.slice(2).map(() => make("span", { class: "num" }));
    this.release = make("small");
    const button = (kind, text, danger) => make("button", {
      type: "button", "aria-label": `${text} ${id}`, ...(danger ? { class: "danger" } : {}), click: () => act(kind, room, id),
    }, text);
    this.acts = make("div", { class: "acts" }, button("drain", "Drain"), button("kill", "Kill", true));
    const row = this.root = make("tr", { role: "row", "data-id": id });
    row.append(cell("Replica", 0, this.name, this.nameMore), cell("State", 0, this.state, this.told, this.progress));
    COLUMNS.slice(2).forEach(([label, right], i) => row.append(cell(label, right, this.cells[i])));
    row.lastChild.append(this.release);
    row.append(cell("Order", 0, this.acts));
  }

  update(r, orders) {
    const named = r.id.startsWith(`${r.name}:`);
    say(this.name, named ? r.name : r.id);
    say(this.nameMore, [named ? r.id.slice(r.name.length + 1) : "", r.ranks > 1 ? several(r.ranks, "rank") : ""].filter(Boolean).join(", "));
    say(this.state, r.state);
    const style = `state ${r.state}`;
    if (this.state.className !== style) this.state.className = style;
    say(this.told, r.told);
    show(this.told, Boolean(r.told));
    const [done, total] = r.heal.length ? r.heal : [0, 0];
    show(this.progress, total > 0);
    if (total > 0) Object.assign(this.progress, { max: total, value: done });
    const texts = [integer(r.step), r.rate ? number(r.rate) : "\u2013", r.version || "\u2013", r.lease_s < 0 ? "none" : `${r.lease_s.toFixed(1)} s`, r.address || "\u2013"];
    texts.forEach((text, i) => say(this.cells[i], text));
    say(this.release, r.release ? `release ${r.release}` : "");
    show(this.acts, orders && r.lease_s >= 0);
  }
}

export class RoomView {
  constructor(name, act) {
    Object.assign(this, { name, act, rows: new Map(), span: "fine", filter: "", ended: false, last: null, lists: {} });
    const heading = `room-${encodeURIComponent(name)}`;
    this.why = make("p", { class: "why", role: "status" });
    this.waiting = make("p", { class: "why soft" });
    this.figures = {};
    const figures = make("dl", { class: "figures" });
    for (const label of ["Members", "Step", "Steps/s", "Quorum", "In force"]) {
      this.figures[label] = make("dd", { class: "num" });
      figures.append(make("div", {}, make("dt", {}, label), this.figures[label]));
    }
    this.charts = [new Chart("rate", "Throughput", "steps/s", 1, false), new Chart("members", "Members", "members", 2, true)];
    this.ranges = Object.entries(SPANS).map(([key, [, , text]]) => make("button", {
      type: "button", "aria-pressed": key === this.span, "data-span": key, click: () => this.chooseSpan(key),
    }, text));
    const [replicas, body] = table(`Replicas of ${name}`, [...COLUMNS, ["Order"]]);
    this.body = body;
    this.search = make("input", { class: "filter", type: "search", placeholder: "name or state", "aria-label": `Filter the replicas of ${name}`, input: e => { this.filter = e.target.value.trim().toLowerCase(); this.replicas(); } });
    this.counts = make("span", { class: "soft" });
    this.goneButton = make("button", { type: "button", "aria-pressed": "false", click: () => { this.ended = !this.ended; this.goneButton.setAttribute("aria-pressed", this.ended); this.replicas(); } });
    this.more = make("p", { class: "soft" });
    this.off = make("p", { class: "soft" });
    this.heals = make("ul", { class: "plain long", tabindex: "0", "aria-label": "Heals" });
    this.noHeals = make("p", { class: "soft" }, "Nobody has received state yet.");
    const [quorums, quorumsBody] = table(`Quorums of ${name}`, [["Formed"], ["Members", 1], ["Step", 1], ["Change"], ["Lasted", 1], ["Ended because"]]);
    this.quorums = quorumsBody;
    this.story = make("ul", { class: "plain long", tabindex: "0", "aria-label": "What happened" });
    this.root = make("section", { class: "room", id: heading, "aria-labelledby": `${heading}-title` },
      make("div", { class: "head" }, make("h2", { id: `${heading}-title` }, `Room ${name}`)),
      this.why, this.waiting, figures,
      make("div", { class: "bar" }, make("h3", {}, "Over time"), make("div", { class: "range", role: "group", "aria-label": "Time shown" }, ...this.ranges)),
      make("div", { class: "charts" }, ...this.charts.map(chart => chart.root)),
      make("div", { class: "bar" }, make("h3", {}, "Replicas"), this.counts, this.goneButton, this.search),
      replicas, this.more, this.off,
      make("h3", {}, "Heals"), this.noHeals, this.heals,
      make("h3", {}, "Quorums"), make("div", { class: "long", tabindex: "0", role: "region", "aria-label": "Quorum history" }, quorums),
      make("details", { open: "" }, make("summary", {}, "What happened"), this.story));
  }

  chooseSpan(key) {
    this.span = key;
    for (const button of this.ranges) button.setAttribute("aria-pressed", button.dataset.span === key);
    this.drawCharts();
  }

  update(room, page) {
    this.last = { room, page };
    const { why, quorum_size: size } = room;
    this.why.classList.toggle("alert", Boolean(why));
    const away = size - room.connected;
    say(this.why, why ? `No quorum: ${why}` : `${several(size, "member")} in quorum ${room.quorum}${away ? `, ${integer(away)} of them not connected` : ""}.`);
    const given = room.given_up.map(g => `${g.name} was given up: ${g.reason}`);
    say(this.waiting, [room.waiting && `Being waited for: ${room.waiting}`, ...given].filter(Boolean).join(" "));
    show(this.waiting, Boolean(this.waiting.textContent));
    const figures = this.figures;
    say(figures.Members, integer(size));
    say(figures.Step, integer(room.step));
    say(figures["Steps/s"], number(room.rate));
    say(figures.Quorum, room.quorum || "none");
    say(figures["In force"], room.quorum_s ? duration(room.quorum_s) : "\u2013");
    this.drawCharts();
    this.replicas();
    this.list("heals", room.heals, () => this.drawHeals(room.heals));
    this.list("quorums", room.quorums, () => this.drawQuorums(room.quorums));
    this.list("story", room.story, () => this.story.replaceChildren(...room.story.map(s => make("li", {}, make("time", {}, clock(s.at)), s.text))));
  }

  // Lists that did not change are the same objects.
  list(name, value, draw) {
    if (this.lists[name] === value) return;
    this.lists[name] = value;
    draw();
  }

  drawCharts() {
    const { room, page } = this.last, [span, every] = SPANS[this.span];
    for (const chart of this.charts) chart.show(room[this.span], span, every, page.at);
  }

  replicas() {
    const { room, page } = this.last, orders = page.orders.on;
    const gone = room.replicas.filter(r => r.state === "gone").length;
    show(this.goneButton, gone > 0);
    say(this.goneButton, `${this.ended ? "Hide" : "Show"} ${several(gone, "that has ended", "that have ended")}`);
    show(this.search, room.replicas.length >= FILTER_FROM || Boolean(this.filter));
    const counted = {};
    for (const r of room.replicas) if (r.state !== "gone") counted[r.state] = (counted[r.state] || 0) + 1;
    say(this.counts, Object.entries(counted).map(([state, n]) => `${integer(n)} ${state}`).join(", ") || "none");
    const wanted = room.replicas.filter(r => (this.ended || r.state !== "gone") && (!this.filter || `${r.id} ${r.state}`.toLowerCase().includes(this.filter)));
    const shown = wanted.slice(0, ROWS_MAX), ids = new Set(shown.map(r => r.id));
    for (const [id, row] of this.rows) if (!ids.has(id)) { row.root.remove(); this.rows.delete(id); }
    shown.forEach((r, place) => {
      let row = this.rows.get(r.id);
      if (!row) this.rows.set(r.id, row = new Row(this.name, r.id, this.act));
      if (this.body.children[place] !== row.root) this.body.insertBefore(row.root, this.body.children[place] || null);
      row.update(r, orders);
    });
    const hidden = wanted.length - shown.length + room.more_replicas;
    say(this.more, hidden ? `${several(hidden, "replica is", "replicas are")} not shown: filter by name or state.` : "");
    say(this.off, page.orders.why);
  }

  drawHeals(heals) {
    show(this.noHeals, !heals.length);
    show(this.heals, heals.length > 0);
    this.heals.replaceChildren(...heals.map(heal => {
      const { id, at, ended_at: ended, total } = heal;
      const of = total ? `${bytes(heal.bytes)}${ended && heal.ok ? "" : ` of ${bytes(total)}`}` : "";
      const step = heal.to_step ? ` to step ${integer(heal.to_step)}` : "";
      const item = make("li", {}, make("time", {}, clock(at)));
      if (!ended) {
        item.append(`${id} heals${step}${of && `: ${of}`} `, make("progress", { "aria-label": `${id} heals`, ...(total ? { max: total, value: heal.bytes } : {}) }));
      } else if (heal.ok) {
        item.append(`${id} healed${step} within ${duration(ended - at)}${of && `: ${of}`}`);
      } else {
        item.append(`${id} did not heal${step}: it was lost, or left, after ${duration(ended - at)}`);
      }
      return item;
    }));
  }

  drawQuorums(quorums) {
    this.quorums.replaceChildren(...quorums.map(q => {
      const change = [...q.joined.map(n => `+ ${n}`), ...q.without.map(n => `\u2212 ${n}`)].join(", ");
      return make("tr", { role: "row" }, cell("Formed", 0, make("span", {}, clock(q.at))), cell("Members", 1, make("span", {}, integer(q.members))),
        cell("Step", 1, make("span", {}, integer(q.step))), cell("Change", 0, make("span", {}, change || "\u2013")),
        cell("Lasted", 1, make("span", {}, q.ended_at ? duration(q.ended_at - q.at) : "in force")), cell("Ended because", 0, make("span", {}, q.reason || "\u2013")));
    }));
  }
}
