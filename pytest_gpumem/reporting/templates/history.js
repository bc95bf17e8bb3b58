"use strict";
(function () {
  const facts = JSON.parse(by("facts").textContent);
  const values = by("values").textContent; // Base64, of which the part of a line is decoded when it is drawn
  const { runs, cards, tests, metrics, changes } = facts;
  const STEP = 50; // tests that are added to the list at once
  const FIRST = 20; // lines of a table of changes before it is unfolded
  const SOME = 2000; // points of a line up to which all are drawn

  function bytes(text) {
    return Uint8Array.from(atob(text), (one) => one.charCodeAt(0));
  }

  // The runs of a set, as indexes.
  const sets = new Map();
  function runsOf(set) {
    if (!sets.has(set)) {
      const found = [];
      bytes(facts.sets[set][1]).forEach((byte, place) => {
        for (let bit = 0; bit < 8; bit++) if (byte & (128 >> bit)) found.push(8 * place + bit);
      });
      sets.set(set, found);
    }
    return sets.get(set);
  }

  // Where the values of each line begin.
  const PALETTE = 0, LOGARITHMIC = 1;
  let end = 0;
  const lines = facts.lines.map(([test, of, card, set, packing, scale]) => {
    const width = packing === PALETTE ? (scale.length > 1 ? 1 : 0) : packing === LOGARITHMIC ? 2 : 4;
    const start = end, length = width * facts.sets[set][0];
    end += Math.ceil(length / 3) * 4;
    const [metric, unit] = metrics[of];
    return { test, metric, unit, card: cards[card], get runs() { return runsOf(set); }, start, length, scale, packing, width, changes: [] };
  });
  const groups = tests.map(([name, id], index) => ({ index, name, id, words: name.toLowerCase(), lines: [], rank: 0 }));
  for (const line of lines) groups[line.test].lines.push(line);
  for (const change of changes) {
    const line = lines[change.series], group = groups[line.test];
    change.rank = change.before > 0 && change.after > 0 ? Math.abs(Math.log(change.after / change.before)) : 1e9;
    line.changes.push(change);
    // First what nobody accepted and got worse lately, then other changes of late, then older ones; each the largest first.
    const rank = change.rank + 1e10 * (change.lately && change.worse && !change.accepted ? 3 : change.lately ? 2 : 1);
    group.rank = Math.max(group.rank, rank);
  }
  const order = groups.slice().sort((a, b) => b.rank - a.rank || a.index - b.index);

  function unpacked(line) {
    if (line.width === 0) return line.runs.map(() => line.scale[0]);
    const from = bytes(values.slice(line.start, line.start + Math.ceil(line.length / 3) * 4));
    const view = new DataView(from.buffer);
    return line.runs.map((_, at) => {
      if (line.packing === PALETTE) return line.scale[from[at]];
      if (line.packing === LOGARITHMIC) return Math.exp(line.scale[0] + line.scale[1] * view.getUint16(2 * at, true));
      return view.getFloat32(4 * at, true);
    });
  }

  // Figures with their units, as in the tables above.
  const UNITS = {
    "s": [["s", 1], ["ms", 1e-3], ["us", 1e-6], ["ns", 1e-9]],
    "B": [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10], ["B", 1]],
  };
  function unitOf(most, unit) {
    const known = UNITS[unit];
    if (known === undefined) return [unit, 1];
    return known.find(([, least]) => most >= least) || known[known.length - 1];
  }
  function digits(value) {
    if (value === 0) return "0";
    return Math.abs(value) >= 1000 ? value.toFixed(0) : String(Number(value.toPrecision(4)));
  }
  function figure(value, unit) {
    const [name, factor] = unitOf(Math.abs(value), unit);
    return digits(value / factor) + (name ? " " + name : "");
  }
  function date(seconds, minutes) {
    return new Date(1000 * seconds).toISOString().slice(0, minutes ? 16 : 10).replace("T", " ");
  }

  function element(name, attributes, ...inside) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...inside);
    return made;
  }
  function shape(name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }
  function joined(points) {
    return "M" + points.map(([x, y]) => x.toFixed(1) + " " + y.toFixed(1)).join("L");
  }
  // The least and the largest; Math.min takes only so many arguments.
  function ends(all) {
    return all.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
  }
  // Of many points, the least and the largest of each step, so that no outlier is lost.
  function thinned(points, most) {
    if (points.length <= most) return points;
    const size = Math.ceil((2 * points.length) / most), found = [];
    for (let from = 0; from < points.length; from += size) {
      const part = points.slice(from, from + size);
      let low = part[0], high = part[0];
      for (const one of part) {
        if (one[1] < low[1]) low = one;
        if (one[1] > high[1]) high = one;
      }
      found.push(...(low === high ? [low] : low[0] < high[0] ? [low, high] : [high, low]));
    }
    return found;
  }

  function style(change) {
    return change.accepted ? "doubt" : change.worse ? "fail" : "pass";
  }
  function mark(change) {
    return (change.accepted ? "◇" : change.worse ? "▲" : "▼") + " " + change.size;
  }

  // The levels between changes: first run, last run, value.
  function levels(line) {
    const found = [];
    let from = 0;
    line.changes.forEach((change, place) => {
      if (change.at > from) found.push([from, change.at - 1, change.before]);
      const next = line.changes[place + 1];
      from = change.at;
      if (next === undefined) found.push([from, line.runs.length - 1, change.after]);
    });
    return found;
  }

  function spark(line) {
    const WIDTH = 140, HEIGHT = 24, all = unpacked(line);
    const [low, high] = ends(all), middle = (low + high) / 2;
    const half = Math.max(high - low, 0.01 * Math.abs(middle), 1e-300) / 2;
    const points = all.map((value, at) => [2 + ((WIDTH - 4) * at) / Math.max(1, all.length - 1), HEIGHT / 2 - ((value - middle) / half) * (HEIGHT / 2 - 2)]);
    const drawn = shape("svg", { class: "spark s0", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
    drawn.append(shape("path", { d: joined(thinned(points, 120)) }));
    for (const change of line.changes) {
      const [x, y] = points[change.at];
      drawn.append(shape("circle", { class: style(change) + " dot", cx: x.toFixed(1), cy: y.toFixed(1), r: 2.6 }));
    }
    return drawn;
  }

  // One plot of a test. `view` has the ends of the horizontal axis, which all plots of a test share.
  function plot(line, view, redraw) {
    const all = unpacked(line);
    const caption = element("figcaption", {}, `${line.metric} on ${line.card}`);
    const told = element("output", { class: "note", "aria-live": "polite" });
    const room = element("div", { class: "plot", tabindex: "0", role: "group", "aria-describedby": "help" });
    const made = element("figure", {}, caption, room, told);
    const byDay = () => by("axis").value === "day";
    const position = (at) => (byDay() ? runs.when[line.runs[at]] : line.runs[at]);
    let cursor = -1, x, picked = null;

    const [low, high] = ends(all);
    room.setAttribute("aria-label",
      `${line.metric} of ${line.runs.length} runs on ${line.card}, from ${date(runs.when[line.runs[0]])} to ${date(runs.when[line.runs[line.runs.length - 1]])}: ` +
      `least ${figure(low, line.unit)}, largest ${figure(high, line.unit)}, last ${figure(all[all.length - 1], line.unit)}` +
      line.changes.map((one) => `; ${one.size} on ${one.date}, commits ${one.commits}, ${one.judged}`).join(""));

    function tell() {
      const at = cursor < 0 ? all.length - 1 : cursor, run = line.runs[at];
      const change = line.changes.find((one) => one.at === at);
      told.textContent = (cursor < 0 ? "last run: " : "") + [
        date(runs.when[run], true) + " UTC", runs.revision[run] || "unknown commit", figure(all[at], line.unit), runs.accepted[run] ? "accepted run" : "recorded run",
        ...(change ? [`${mark(change)}, ${change.levels}, ${change.judged}`] : []),
      ].join(", ");
    }

    function draw() {
      const WIDTH = Math.max(280, room.clientWidth || 480), HEIGHT = 210, LEFT = 54, RIGHT = 14, TOP = 38, BOTTOM = 34;
      const right = WIDTH - RIGHT, bottom = HEIGHT - BOTTOM;
      const svg = shape("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, "aria-hidden": "true" });
      x = (at) => LEFT + ((at - view.from) / Math.max(1e-9, view.to - view.from)) * (right - LEFT);
      x.back = (pixel) => view.from + ((pixel - LEFT) / (right - LEFT)) * (view.to - view.from);
      x.left = LEFT; x.right = right; x.width = WIDTH; x.top = TOP; x.bottom = bottom;

      const shown = all.map((_, at) => at).filter((at) => position(at) >= view.from && position(at) <= view.to);
      const seen = shown.length ? shown.map((at) => all[at]) : all;
      const [least, most] = ends(seen);
      const half = Math.max((most - least) * 0.55, Math.abs(most) * 0.001, line.unit === "s" ? 1e-12 : 0.5 * (line.unit === "" || line.unit === "B")), middle = (least + most) / 2;
      const y = (value) => bottom - ((value - middle + half) / (2 * half)) * (bottom - TOP);
      const [unit, factor] = unitOf(Math.max(Math.abs(least), Math.abs(most)), line.unit);
      const rough = (2 * half) / factor / 4, power = 10 ** Math.floor(Math.log10(rough));
      const nice = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough * (1 - 1e-9));
      const step = unit === "" || unit === "B" ? Math.max(1, nice) : nice; // there is no half of a byte
      let grid = "";
      for (let tick = Math.ceil((middle - half) / factor / step - 1e-9); tick * step * factor <= middle + half; tick++) {
        const at = Math.round(y(tick * step * factor));
        const label = Number((tick * step).toPrecision(10));
        grid += `M${LEFT} ${at}H${right}`;
        svg.append(shape("text", { x: LEFT - 5, y: at + 4, "text-anchor": "end" }, String(Math.abs(label) >= 1e6 ? label.toPrecision(7) : label)));
      }
      svg.prepend(shape("path", { class: "grid", d: grid }));
      svg.append(shape("text", { x: 0, y: 12, class: "unit" }, line.metric + (unit ? ", " + unit : "")));

      // The horizontal axis: commits, or days.
      svg.append(shape("path", { class: "axis", d: `M${LEFT} ${bottom}H${right}` }));
      const wanted = Math.max(2, Math.floor((right - LEFT) / 110));
      let free = -1e9;
      for (let tick = 0; tick < wanted; tick++) {
        const at = view.from + ((view.to - view.from) * (tick + 0.5)) / wanted;
        let label, where;
        if (byDay()) {
          const day = 86400 * Math.round(at / 86400);
          [label, where] = [date(day), x(day)];
        } else {
          const near = shown.length ? line.runs[shown.reduce((a, b) => (Math.abs(line.runs[b] - at) < Math.abs(line.runs[a] - at) ? b : a))] : -1;
          if (near < 0) continue;
          [label, where] = [runs.revision[near] || date(runs.when[near]), x(near)];
        }
        const wide = label.length * 3.6;
        if (where - wide < Math.max(free, LEFT - 20) || where + wide > WIDTH + 4) continue;
        free = where + wide + 8;
        svg.append(shape("path", { class: "axis", d: `M${where.toFixed(1)} ${bottom}v4` }), shape("text", { x: where.toFixed(1), y: bottom + 15, "text-anchor": "middle" }, label));
      }
      const period = shown.length ? `${date(runs.when[line.runs[shown[0]]])} to ${date(runs.when[line.runs[shown[shown.length - 1]]])}` : "no run here";
      svg.append(shape("text", { x: (LEFT + right) / 2, y: bottom + 29, "text-anchor": "middle", class: "unit" }, byDay() ? "day (UTC)" : `commits, ${period}`));

      // Changes below the line, each with its strip of suspects; sizes of near ones in two rows.
      const busy = [-1e9, -1e9];
      for (const change of line.changes) {
        const where = position(change.at);
        if (where < view.from || where > view.to) continue;
        const from = Math.max(LEFT, x(position(Math.max(0, change.earliest - 1)))), to = Math.min(right, x(position(change.latest)));
        const css = style(change), at = x(where).toFixed(1);
        svg.append(shape("rect", { class: css + " range", x: from.toFixed(1), y: TOP, width: Math.max(2, to - from).toFixed(1), height: bottom - TOP }));
        svg.append(shape("path", { class: `${css} at${change.accepted ? " accepted" : ""}`, d: `M${at} ${TOP}V${bottom}` }));
        const label = mark(change), wide = label.length * 3.7, centre = Math.min(right - wide, Math.max(LEFT + wide, x(where)));
        const row = busy.findIndex((taken) => centre - wide > taken);
        if (row >= 0) {
          busy[row] = centre + wide + 6;
          svg.append(shape("text", { x: centre.toFixed(1), y: TOP - 5 - 13 * row, "text-anchor": "middle", class: css }, label));
        }
      }
      const points = thinned(shown.map((at) => [x(position(at)), y(all[at])]), SOME);
      if (points.length) svg.append(shape("path", { class: "s0 value", d: joined(points) }));
      if (points.length <= 150) svg.append(shape("path", { class: "s0 sample", d: points.map(([a, b]) => `M${a.toFixed(1)} ${b.toFixed(1)}h0`).join("") }));
      for (const [first, last, value] of levels(line)) {
        const from = Math.max(LEFT, x(position(first))), to = Math.min(right, x(position(last)));
        if (to >= from && value >= middle - half && value <= middle + half) svg.append(shape("path", { class: "s0 level", d: `M${from.toFixed(1)} ${y(value).toFixed(1)}H${to.toFixed(1)}` }));
      }
      if (cursor >= 0 && position(cursor) >= view.from && position(cursor) <= view.to) {
        svg.append(shape("path", { class: "cursor", d: `M${x(position(cursor)).toFixed(1)} ${TOP}V${bottom}` }), shape("circle", { class: "s1 dot", cx: x(position(cursor)).toFixed(1), cy: y(all[cursor]).toFixed(1), r: 4 }));
      }
      room.replaceChildren(svg);
    }

    function nearest(at) {
      let found = 0;
      for (let one = 1; one < line.runs.length; one++) if (Math.abs(position(one) - at) < Math.abs(position(found) - at)) found = one;
      return found;
    }
    function to(next) {
      cursor = Math.max(0, Math.min(all.length - 1, next));
      const at = position(cursor), width = view.to - view.from;
      if (at < view.from || at > view.to) { // the cursor takes the view along
        view.move(at - width / 2, at + width / 2);
        redraw();
      } else draw();
      tell();
    }
    function pixel(event) {
      const frame = room.getBoundingClientRect();
      return ((event.clientX - frame.left) / frame.width) * x.width;
    }
    room.addEventListener("keydown", (event) => {
      if (event.ctrlKey || event.altKey || event.metaKey) return;
      const start = cursor < 0 ? nearest(view.to) : cursor;
      const acts = {
        ArrowLeft: () => to(start - 1), ArrowRight: () => to(start + 1), PageUp: () => to(start - 10), PageDown: () => to(start + 10),
        Home: () => to(0), End: () => to(all.length - 1),
        "+": () => view.zoom(0.5, cursor < 0 ? null : position(cursor)), "=": () => view.zoom(0.5, cursor < 0 ? null : position(cursor)),
        "-": () => view.zoom(2, cursor < 0 ? null : position(cursor)), "0": () => view.whole(),
      };
      if (acts[event.key] === undefined) return;
      event.preventDefault();
      acts[event.key]();
    });
    room.addEventListener("pointerdown", (event) => {
      if (event.button === 0) {
        picked = pixel(event);
        room.setPointerCapture(event.pointerId);
      }
    });
    room.addEventListener("pointermove", (event) => {
      cursor = nearest(x.back(pixel(event)));
      draw();
      tell();
      if (picked !== null) {
        const [from, until] = [picked, pixel(event)].sort((a, b) => a - b);
        room.firstChild.append(shape("rect", { class: "drag", x: from.toFixed(1), y: x.top, width: (until - from).toFixed(1), height: x.bottom - x.top }));
      }
    });
    room.addEventListener("pointerup", (event) => {
      const start = picked, until = pixel(event);
      picked = null;
      if (start === null || Math.abs(until - start) < 8) return draw();
      view.move(x.back(Math.min(start, until)), x.back(Math.max(start, until)));
      redraw();
    });
    room.addEventListener("pointercancel", () => { picked = null; });
    room.addEventListener("dblclick", () => view.whole());
    tell();
    return { made, draw };
  }

  // What a test's section shows once it is open.
  const open = new Map(); // by section, how to draw it anew
  function fill(section, group) {
    const plots = [], chosen = group.lines.filter(fits), shown = chosen.length ? chosen : group.lines;
    const redraw = () => { for (const one of plots) one.draw(); };
    const positions = (of) => {
      const found = shown.flatMap((line) => [line.runs[0], line.runs[line.runs.length - 1]].map((run) => (by("axis").value === "day" ? runs.when[run] : run)));
      return of(...found);
    };
    const view = {
      from: 0, to: 1,
      move(from, to) {
        const first = positions(Math.min), last = positions(Math.max), least = by("axis").value === "day" ? 86400 : 3;
        const width = Math.min(Math.max(to - from, least), Math.max(last - first, 1));
        const centre = (from + to) / 2;
        this.from = Math.max(first, Math.min(centre - width / 2, last - width));
        this.to = this.from + width;
      },
      whole() { this.move(positions(Math.min), positions(Math.max)); redraw(); },
      zoom(factor, about) {
        const centre = about === null ? (this.from + this.to) / 2 : about, half = ((this.to - this.from) * factor) / 2;
        this.move(centre - half, centre + half);
        redraw();
      },
    };
    const button = (text, act) => {
      const made = element("button", { type: "button" }, text);
      made.addEventListener("click", act);
      return made;
    };
    const tools = element("div", { class: "tools" },
      button("zoom in", () => view.zoom(0.5, null)), button("zoom out", () => view.zoom(2, null)), button("all runs", () => view.whole()),
      element("a", { href: "#" + group.id }, "link to this test"));
    const grid = element("div", { class: "grid" }), same = new Map();
    for (const line of shown) {
      if (line.width === 0) { // a plot of a value that never changed says less than the value
        same.set(line.card, [...(same.get(line.card) || []), `${line.metric} ${figure(line.scale[0], line.unit)}`]);
        continue;
      }
      const one = plot(line, view, redraw);
      plots.push(one);
      grid.append(one.made);
    }
    const list = element("ul", { class: "found" });
    for (const line of shown) {
      for (const change of line.changes) {
        list.append(element("li", {},
          element("strong", { class: style(change) }, mark(change)), ` ${line.metric} ${change.levels}, ${change.date}, commits `, element("code", {}, change.commits),
          `, ${line.card}, ${change.judged}`));
      }
    }
    const constant = element("dl", {});
    for (const [of, texts] of same) constant.append(element("dt", {}, of), element("dd", {}, "the same in all runs: " + texts.join(", ")));
    section.replaceChildren(section.firstChild, tools, ...(list.firstChild ? [list] : []), grid, ...(same.size ? [constant] : []));
    view.whole();
    open.set(section, { redraw, whole: () => view.whole() });
  }

  function entry(group) {
    const some = group.lines.filter(fits), chosen = some.length ? some : group.lines;
    const [worst] = chosen.flatMap((one) => one.changes).sort((a, b) => b.lately - a.lately || a.accepted - b.accepted || b.worse - a.worse || b.rank - a.rank);
    const line = worst === undefined ? chosen[0] : lines[worst.series], all = unpacked(line);
    const name = element("span", { class: "name" }, group.name);
    const summary = element("summary", {}, name);
    if (worst !== undefined) summary.append(element("span", { class: "chip " + style(worst) }, mark(worst)));
    summary.append(spark(line), element("span", { class: "last" }, `${line.metric} ${figure(all[all.length - 1], line.unit)}`));
    const section = element("details", { id: group.id }, summary);
    section.addEventListener("toggle", () => {
      if (section.open) fill(section, group);
      else open.delete(section);
    });
    return section;
  }

  // The filter, for the tables and the list.
  const list = by("list"), more = by("more");
  let found = [], listed = 0;
  let metric = "", card = "";
  function fits(line) {
    return (metric === "" || line.metric === metric) && (card === "" || line.card === card);
  }
  function add() {
    const next = found.slice(listed, listed + STEP);
    listed += next.length;
    list.append(...next.filter((group) => by(group.id) === null).map(entry));
    more.hidden = listed >= found.length;
    more.textContent = `show ${Math.min(STEP, found.length - listed)} more of ${found.length - listed}`;
  }
  const tables = Array.from(document.querySelectorAll(".changes"), (table) => {
    const rows = Array.from(table.tBodies[0].rows, (row) => ({ row, words: row.cells[0].textContent.toLowerCase(), metric: row.cells[1].textContent, card: row.cells[6].textContent }));
    const button = element("button", { type: "button", class: "script" });
    button.addEventListener("click", () => { made.most = Infinity; filter(); });
    table.after(button);
    const made = { rows, button, most: FIRST };
    return made;
  });
  function filter() {
    const words = by("text").value.toLowerCase().split(/\s+/).filter(Boolean);
    const named = (one) => words.every((word) => one.words.includes(word));
    metric = by("metric").value;
    card = by("card").value;
    const changed = by("changed").checked;
    found = order.filter((group) => named(group) && group.lines.some((line) => fits(line) && (!changed || line.changes.length > 0)));
    for (const table of tables) {
      const fitting = table.rows.filter((one) => named(one) && fits(one));
      for (const one of table.rows) one.row.hidden = true;
      for (const one of fitting.slice(0, table.most)) one.row.hidden = false;
      table.button.hidden = fitting.length <= table.most;
      table.button.textContent = `show all ${fitting.length}`;
    }
    by("count").textContent = `${found.length} of ${groups.length} tests`;
    list.replaceChildren();
    open.clear();
    listed = 0;
    add();
  }
  by("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const id of ["text", "metric", "card", "changed"]) by(id).addEventListener("input", filter);
  by("axis").addEventListener("input", () => { for (const one of open.values()) one.whole(); });
  more.addEventListener("click", add);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (width === window.innerWidth) return; // on a telephone the height changes while the page scrolls
    width = window.innerWidth;
    for (const one of open.values()) one.redraw();
  });

  // A link to a test opens its section, whatever the filter and the length of the list hide.
  function go() {
    const group = groups.find((one) => "#" + one.id === location.hash);
    if (group === undefined) return;
    if (by(group.id) === null) list.prepend(entry(group));
    by(group.id).open = true;
    by(group.id).scrollIntoView();
  }
  window.addEventListener("hashchange", go);
  filter();
  go();
})();
