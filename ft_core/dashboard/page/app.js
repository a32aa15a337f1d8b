// The page's connection, what it knows, and its orders.
//
// Server-sent events are read with fetch, not EventSource: the token travels in a header. "page" replaces everything,
// "change" leaves out lists that are here already. A silence of SILENT_MS ends the connection, and it is opened again.
import { RoomView, make, say } from "./view.js";
import { clock, duration, several } from "./words.js";

const SILENT_MS = 5000, LATE_MS = 3000, AGAIN_MS = 1000, AGAIN_MAX_MS = 5000, SHOWN_MS = 15000;
const KEPT = { fine: 600, coarse: 1440 };   // points of a chart
const CARRIED = ["fine", "coarse", "quorums", "heals", "story"];
const at = id => document.getElementById(id);
const views = new Map();
let page = null, token = "", heard = performance.now(), trouble = "connecting", drawing = false;

// ---------------------------------------------------------------- what is known

function merge(change) {
  if (!page) return;
  const known = new Map(page.rooms.map(room => [room.room, room]));
  for (const room of change.rooms) {
    const old = known.get(room.room);
    if (!old) continue;
    for (const name of CARRIED) if (!(name in room)) room[name] = old[name];
    for (const [name, points] of Object.entries(room.newest)) {
      const list = room[name];
      for (const p of points) {
        if (list.length && list[list.length - 1][0] === p[0]) list[list.length - 1] = p;
        else if (!list.length || p[0] > list[list.length - 1][0]) list.push(p);
      }
      if (list.length > KEPT[name]) list.splice(0, list.length - KEPT[name]);
    }
  }
  page = change;
}

// Once per frame, however many messages came; not at all while nobody sees the page.
function draw() {
  if (drawing) return;
  drawing = true;
  requestAnimationFrame(() => {
    drawing = false;
    render();
    tell();
  });
}

function render() {
  const names = new Set(page.rooms.map(room => room.room)), rooms = at("rooms");
  for (const [name, view] of views) if (!names.has(name)) { view.root.remove(); views.delete(name); }
  page.rooms.forEach((room, place) => {
    let view = views.get(room.room);
    if (!view) views.set(room.room, view = new RoomView(room.room, ask));
    if (rooms.children[place] !== view.root) rooms.insertBefore(view.root, rooms.children[place] || null);
    view.update(room, page);
  });
  const index = at("index"), wanted = page.rooms.map(room => room.room).join("\n");
  if (index.dataset.rooms !== wanted) {
    index.dataset.rooms = wanted;
    index.replaceChildren(...page.rooms.map(room => make("a", { href: `#room-${encodeURIComponent(room.room)}` }, room.room)));
    index.hidden = page.rooms.length < 2;
  }
  say(at("about"), `release ${page.release}, up for ${duration(page.uptime_s)}, ${several(page.rooms.length + page.more_rooms, "room")}`);
  const [first] = page.rooms, pair = at("pair");
  pair.hidden = !page.pair;
  pair.classList.toggle("alert", Boolean(page.pair && page.pair.alone));
  say(pair, page.pair ? page.pair.told : "");
  document.title = !first ? `${page.pair && page.pair.role === "standby" ? "stands by - " : ""}Lighthouse` : first.why ? "no quorum - Lighthouse" : `${first.quorum_size} at step ${first.step} - Lighthouse`;
}

// The sentence on whether what is shown is new.
function tell() {
  const silent = performance.now() - heard, news = at("news");
  let text = "Live.";
  if (!page) text = trouble ? `Not connected: ${trouble}.` : "Connecting.";
  else if (silent > LATE_MS) text = `No news for ${duration(silent / 1000)}${trouble && `: ${trouble}`}. What is shown is as of ${clock(page.at)}.`;
  else if (page.silent_s > 2) text = `The lighthouse has not answered for ${duration(page.silent_s)}. What is shown is as of ${clock(page.at)}.`;
  else if (!page.rooms.length && !(page.pair && page.pair.role === "standby")) text = "Live. No replica has connected yet.";
  news.classList.toggle("late", !text.startsWith("Live") && !text.startsWith("Connecting"));
  say(news, text);
}

// ---------------------------------------------------------------- the connection

// What cannot travel in a header is no token; fetch would take it for a failure of the network.
const UNSENDABLE = "This is not the token: it has characters that no token has. Is something left of how it was copied?";
const sendable = text => /^[\x20-\x7e]*$/.test(text);

function headers() {
  return token ? { Authorization: `Bearer ${token}` } : {};
}

async function watch() {
  const stop = new AbortController();
  let timer = 0;
  const alive = () => { clearTimeout(timer); timer = setTimeout(() => stop.abort(), SILENT_MS); };
  try {
    alive();
    const answer = await fetch("events", { headers: headers(), cache: "no-store", signal: stop.signal });
    if (!answer.ok) {
      trouble = (await answer.text()).trim() || `status ${answer.status}`;
      return answer.status === 401;
    }
    trouble = "";
    const text = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    let kept = "";
    for (;;) {
      const { value, done } = await text.read();
      if (done) return false;
      alive();
      const messages = (kept + value).split("\n\n");
      kept = messages.pop();
      for (const message of messages) take(message);
    }
  } catch (error) {
    trouble = stop.signal.aborted ? "the connection was silent" : "the lighthouse cannot be reached";
    return false;
  } finally {
    clearTimeout(timer);
    stop.abort();
  }
}

function take(message) {
  const found = /^event: (page|change)\ndata: (.*)$/.exec(message);
  if (!found) return;
  const value = JSON.parse(found[2]);
  if (found[1] === "page") page = value; else merge(value);
  heard = performance.now();
  trouble = "";
  draw();
}

function login() {
  return new Promise(resolve => {
    const form = at("login");
    say(at("login-error"), token ? "This is not the token." : "");
    form.hidden = false;
    at("token").focus();
    form.onsubmit = event => {
      event.preventDefault();
      const given = at("token").value.trim();
      at("token").value = "";
      say(at("login-error"), sendable(given) ? "" : UNSENDABLE);
      if (!sendable(given)) return;
      token = given;
      form.hidden = true;
      resolve();
    };
  });
}

async function run() {
  let pause = AGAIN_MS;
  for (;;) {
    const before = heard;
    if (await watch()) { await login(); continue; }
    tell();
    pause = heard > before ? AGAIN_MS : Math.min(AGAIN_MAX_MS, pause * 1.5);
    await new Promise(resolve => setTimeout(resolve, pause));
  }
}

// ---------------------------------------------------------------- orders

let asked = null, shown = 0;

function ask(kind, room, replica) {
  asked = { kind, room, replica };
  const kill = kind === "kill";
  say(at("order-title"), `${kill ? "Kill" : "Drain"} ${replica}?`);
  say(at("order-text"), kill
    ? "Its processes exit at once, and the step in flight is lost for all. A supervisor may start it again."
    : "It finishes its step, leaves the quorum and ends. The others go on without it; a supervisor does not start it again.");
  say(at("order-error"), "");
  at("order-token").value = token;
  at("order-reason").value = "";
  const yes = at("order-yes");
  say(yes, kill ? "Kill" : "Drain");
  yes.className = kill ? "danger" : "";
  yes.disabled = false;
  at("order").showModal();
  at("order-no").focus();
}

async function order(event) {
  event.preventDefault();
  const mine = asked, { kind, room, replica } = mine, given = at("order-token").value.trim(), yes = at("order-yes");
  say(at("order-error"), sendable(given) ? "" : UNSENDABLE);
  if (!sendable(given)) return;
  yes.disabled = true;
  try {
    const answer = await fetch(kind, {
      method: "POST", cache: "no-store", credentials: "omit",
      headers: { "Content-Type": "application/json", "X-FT-Dashboard": "1", ...(given ? { Authorization: `Bearer ${given}` } : {}) },
      body: JSON.stringify({ room, replica, reason: at("order-reason").value.trim() }),
    });
    if (!answer.ok) throw new Error((await answer.text()).trim() || `status ${answer.status}`);
    token = given || token;   // in this tab's memory only
    if (asked === mine) at("order").close();
    told(`${replica} was ordered to ${kind === "kill" ? "exit" : "drain"} at ${clock(Date.now() / 1000)}.`);
  } catch (error) {
    const why = error instanceof TypeError ? "The lighthouse cannot be reached." : error.message;
    if (asked === mine) say(at("order-error"), why);
    else told(`${replica} was not ordered to ${kind === "kill" ? "exit" : "drain"}: ${why}`);
  } finally {
    if (asked === mine) yes.disabled = false;
  }
}

function told(text) {
  clearTimeout(shown);
  shown = setTimeout(() => say(at("result"), ""), SHOWN_MS);
  say(at("result"), text);
}

at("order").querySelector("form").addEventListener("submit", order);
// What is answered later belongs to no dialog. (This comes late, too: the next one may be open already.)
at("order").addEventListener("close", () => { if (!at("order").open) asked = null; });
at("order-no").addEventListener("click", () => at("order").close());
setInterval(tell, 1000);
tell();
run();
