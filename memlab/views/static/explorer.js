// The explorer: the stack of single allocations over time. A worker holds the columns and paints what is seen, pixel column by
// pixel column; this page moves the last picture until the next one is there. Text from outside only ever becomes textContent.

const {bytesText, ink, make, write} = memlabChart;

// --- in the worker: it must not use anything from outside of this function ------------------------------------------------------

function makeEngine() {
  const NEVER_SHOWN = -1, MOST_LAYERS = 12, LISTED = 12, LARGEST = 20;
  const TEXTS = ['module', 'line', 'stack', 'op', 'dtype', 'shape', 'name'];
  let runs = [], colours = null;

  async function readRun(base64) {
    const stream = new Blob([Uint8Array.from(atob(base64), c => c.charCodeAt(0))]).stream().pipeThrough(new DecompressionStream('gzip'));
    const bytes = new Uint8Array(await new Response(stream).arrayBuffer());
    const length = new DataView(bytes.buffer).getUint32(0, true), run = JSON.parse(new TextDecoder().decode(bytes.subarray(4, 4 + length)));
    let offset = 4 + length;
    const columns = {};
    for (const [name, kind, count] of run.columns) {
      const width = kind === 'f8' ? 8 : 4, buffer = new Uint8Array(count * width);
      for (let plane = 0; plane < width; plane++)
        for (let i = 0, from = offset + plane * count; i < count; i++) buffer[i * width + plane] = bytes[from + i];
      offset += count * width;
      columns[name] = width === 8 ? new Float64Array(buffer.buffer) : new Uint32Array(buffer.buffer);
    }
    const events = columns.time.length, count = columns.begin.length;
    Object.assign(run, {events, count, block: columns.block, origin: columns.origin, rounding: columns.rounding, roundings: columns.roundings});
    run.time = new Float64Array(events); run.begin = new Int32Array(count); run.end = new Int32Array(count);
    run.size = new Float64Array(count); run.level = new Float64Array(events);
    for (let i = 0, ticks = 0; i < events; i++) run.time[i] = (ticks += columns.time[i]) * run.tick_s;
    for (let i = 0, begin = 0; i < count; i++) {
      run.begin[i] = begin += columns.begin[i];
      run.end[i] = begin + columns.age[i];
      run.size[i] = columns.sizes[columns.size[i]];
      run.level[begin] += run.size[i];
      if (run.end[i] < events) run.level[run.end[i]] -= run.size[i];
    }
    for (let i = 1; i < events; i++) run.level[i] += run.level[i - 1];
    run.of = Object.fromEntries(['category', 'phase', 'old', ...TEXTS].map(name => [name, columns[`of ${name}`]]));
    run.origins = run.of.category.length;
    run.matches = new Uint8Array(run.origins).fill(1);
    run.phaseTime = columns['phase time'] ? Float64Array.from(columns['phase time'], ticks => ticks * run.tick_s) : new Float64Array(0);
    run.phaseCode = columns['phase code'] || new Uint32Array(0);
    run.top = run.level.reduce((a, b) => Math.max(a, b), 0);
    run.highest = run.peak.event >= 0 ? run.peak.event : run.level.indexOf(run.top);
    return run;
  }

  const text = (run, column, origin) => run.texts[column][run.of[column][origin]];

  function nameOf(run, by, origin) {
    if (by === 'category') return colours.categories[run.of.category[origin]][0];
    if (by === 'phase') return run.of.old[origin] ? 'before the run' : colours.phases[run.of.phase[origin]][0];
    if (by === 'none') return 'all blocks';
    const name = text(run, by === 'line' ? 'line' : 'module', origin);
    if (!name) return run.of.old[origin] ? 'before the run' : by === 'line' ? 'line not known' : 'outside any module';
    return by === 'repeated' ? name.replace(/(^|\.)\d+(?=\.|$)/g, '$1*') : name;
  }

  function namesOf(run, by) {                        // origin -> number of its name, and the names
    const known = new Map(), numbers = new Int32Array(run.origins);
    for (let origin = 0; origin < run.origins; origin++) {
      const name = nameOf(run, by, origin);
      if (!known.has(name)) known.set(name, known.size);
      numbers[origin] = known.get(name);
    }
    return {numbers, names: [...known.keys()]};
  }

  function heldAt(run, event, numbers, size) {       // bytes per number at one event
    const held = new Float64Array(size);
    for (let i = 0; i < run.count && run.begin[i] <= event; i++)
      if (run.end[i] > event) held[numbers[run.origin[i]]] += run.size[i];
    return held;
  }

  function setLayers(by) {                           // the same names and colours in all runs, the largest at the peak first
    const total = new Map();
    for (const run of runs) {
      run.byName = namesOf(run, by);
      const held = heldAt(run, run.highest, run.byName.numbers, run.byName.names.length);
      run.byName.names.forEach((name, i) => total.set(name, (total.get(name) || 0) + held[i]));
    }
    let names = [...total.keys()].sort((a, b) => total.get(b) - total.get(a));
    const isMany = names.length > MOST_LAYERS;
    if (by === 'category') names = colours.order.filter(name => total.has(name));
    if (isMany) names = [...names.slice(0, MOST_LAYERS - 1), 'others'];
    const fixed = new Map([...colours.categories, ...colours.phases]);
    const layers = names.map((name, i) => ({name, colour: by === 'category' || by === 'phase' ? fixed.get(name) || '#939393'
      : name === 'others' ? '#939393' : colours.palette[i % colours.palette.length]}));
    for (const run of runs) {
      const of = run.byName.names.map(name => names.includes(name) ? names.indexOf(name) : names.length - 1);
      run.layerOf = Uint8Array.from(run.byName.numbers, number => of[number]);
    }
    return Object.assign(setLayers, {layers, by}).layers;
  }

  function search({words = '', name, by}) {          // words in any text of a block, or one name of a layer
    const wanted = words.trim().toLowerCase(), hits = {}, categories = colours.categories.map(([one]) => one.includes(wanted));
    for (const run of runs) {
      for (const column of TEXTS) hits[column] = run.texts[column].map(one => one.toLowerCase().includes(wanted));
      run.matches = run.matches.map((_, origin) => name !== undefined ? nameOf(run, by, origin) === name
        : !wanted || categories[run.of.category[origin]] || TEXTS.some(column => hits[column][run.of[column][origin]]));
    }
    return runs.map(run => {
      let blocks = 0, bytes = 0;
      for (let i = 0; i < run.count; i++) {
        if (!run.matches[run.origin[i]]) continue;
        if (isFirst(run, i)) blocks++;
        if (run.begin[i] <= run.highest && run.end[i] > run.highest) bytes += run.size[i];
      }
      return {blocks, bytes};
    });
  }

  function firstAt(sorted, value) {                  // the first index whose value is not below
    let low = 0, high = sorted.length;
    while (low < high) { const middle = (low + high) >> 1; if (sorted[middle] < value) low = middle + 1; else high = middle; }
    return low;
  }

  const eventAt = (run, axis, x) => axis === 'time' ? firstAt(run.time, x) : Math.min(run.events, Math.max(0, Math.ceil(x)));

  function momentOfColumns(run, {x0, x1, width, axis}) {   // for each column the event with the highest level in it; -1 outside of the run
    const moments = new Int32Array(width).fill(NEVER_SHOWN), last = axis === 'time' ? run.end_s : run.events;
    let first = eventAt(run, axis, x0);
    for (let column = 0; column < width; column++) {
      const from = x0 + (x1 - x0) * column / width, to = x0 + (x1 - x0) * (column + 1) / width, next = eventAt(run, axis, to);
      if (to > 0 && from < last) {
        let best = first < next ? first : first - 1;
        for (let event = best + 1; event < next; event++) if (run.level[event] > run.level[best]) best = event;
        moments[column] = Math.max(best, 0);
      }
      first = next;
    }
    return moments;
  }

  function picture(run, {view}) {
    const {width, height, selected} = view, moments = momentOfColumns(run, view), layerCount = setLayers.layers.length;
    const left = moments.findIndex(moment => moment >= 0), pixels = new Uint32Array(width * height);
    const blocks = new Int32Array(width * height).fill(NEVER_SHOWN), small = new Float32Array(layerCount * width);
    let top = 0;
    for (const moment of moments) if (moment >= 0) top = Math.max(top, run.level[moment]);
    const y0 = view.y0, y1 = view.y1 ?? view.roomy[Math.min(view.roomy.length - 1, firstAt(view.roomy, top * 1.04))];
    const result = {pixels, blocks, small, moments, y0, y1, top, phases: phasesOf(run, view), view};
    if (left < 0) return result;
    let right = left;
    while (right + 1 < width && moments[right + 1] >= 0) right++;
    const from = moments[left], to = moments[right], columnOf = new Int32Array(to - from + 2);
    for (let column = left, event = from; column <= right; column++) while (event <= moments[column]) columnOf[event++ - from] = column;
    // Bytes of each layer in each column as differences; what is at least a pixel high is painted on its own.
    const perPixel = (y1 - y0) / height, stride = width + 1, rest = new Float64Array(layerCount * stride);
    const firsts = [], afters = [], large = Array.from({length: layerCount}, () => []);
    for (let i = 0; i < run.count; i++) {
      const begin = run.begin[i], end = run.end[i];
      if (begin > to) break;
      if (end <= from) continue;
      const first = begin <= from ? left : columnOf[begin - from], after = end > to ? right + 1 : columnOf[end - from];
      if (first >= after) continue;
      const layer = run.layerOf[run.origin[i]], size = run.size[i];
      if (size >= perPixel) { large[layer].push(firsts.length, i); firsts.push(first); afters.push(after); }
      else { rest[layer * stride + first] += size; rest[layer * stride + after] -= size; }
    }
    const base = new Float64Array(width), {shades, faded, chosen} = view.colours;
    const row = bytes => Math.round(height - (bytes - y0) / perPixel);
    const paint = (column, size, colour, edge, block) => {
      const bottom = row(base[column]), high = row(base[column] + size), end = Math.min(bottom, height);
      base[column] += size;
      for (let y = Math.max(high, 0); y < end; y++) {
        pixels[y * width + column] = y === high && bottom - high > 3 ? edge : colour;
        blocks[y * width + column] = block;
      }
    };
    for (let layer = 0; layer < layerCount; layer++) {
      const [even, odd, edge, pale, lit] = shades[layer];
      for (let k = 0; k < large[layer].length; k += 2) {
        const i = large[layer][k + 1], size = run.size[i], first = firsts[large[layer][k]], after = afters[large[layer][k]];
        const isChosen = run.block[i] === selected, isFaded = !run.matches[run.origin[i]];
        const colour = isChosen ? (size > 6 * perPixel ? lit : chosen) : isFaded ? faded : run.block[i] & 1 ? odd : even;
        const line = isChosen ? chosen : isFaded ? faded : edge;
        for (let column = first; column < after; column++) paint(column, size, column === first && after - first > 3 ? line : colour, line, i);
      }
      for (let column = 0, sum = 0; column < width; column++) {
        sum += rest[layer * stride + column];
        small[layer * width + column] = sum;
        if (sum > 0.5) paint(column, sum, view.isSearch ? faded : pale, view.isSearch ? faded : pale, -2 - layer);
      }
    }
    return result;
  }

  function phasesOf(run, {x0, x1, width, axis}) {
    const codes = new Uint8Array(width), last = axis === 'time' ? run.end_s : run.events;
    if (!run.phaseTime.length) return codes;
    for (let column = 0; column < width; column++) {
      const x = x0 + (x1 - x0) * (column + 0.5) / width;
      if (x < 0 || x > last) continue;
      const at = axis === 'time' ? x : run.time[Math.min(run.events - 1, Math.floor(x))];
      const place = firstAt(run.phaseTime, at + 1e-12) - 1;
      codes[column] = place >= 0 ? run.phaseCode[place] : 0;
    }
    return codes;
  }

  const isFirst = (run, i) => !run.several || run.several.get(run.block[i])[0] === i;

  function findSeveral(run) {                        // blocks that changed their category have several pieces
    run.blocks = new Set(run.block).size;
    if (run.count === run.blocks) return;
    run.several = new Map();
    run.block.forEach((block, i) => { if (run.several.has(block)) run.several.get(block).push(i); else run.several.set(block, [i]); });
  }

  function facts(run, {piece: i}) {
    const all = run.several ? run.several.get(run.block[i]) : [i], origin = run.origin[i], last = all[all.length - 1];
    const found = {piece: i, block: run.block[i], size: run.size[i], requested: run.size[i] - run.roundings[run.rounding[i]],
      phase: colours.phases[run.of.phase[origin]][0], old: !!run.of.old[origin], begin: run.begin[all[0]], end: run.end[last], layer: run.layerOf[origin],
      begin_s: run.time[run.begin[all[0]]], end_s: run.end[last] < run.events ? run.time[run.end[last]] : null,
      categories: all.map(piece => [nameOf(run, 'category', run.origin[piece]), run.time[run.begin[piece]]]),
      category: nameOf(run, 'category', origin),
      holders: run.holders ? run.holders[run.block[i]] || [] : null};
    for (const column of TEXTS) found[column] = text(run, column, origin);
    return found;
  }

  function layersAt(run, {event}) {
    const held = heldAt(run, event, run.byName.numbers, run.byName.names.length);
    const rows = run.byName.names.map((name, i) => ({name, bytes: held[i]})).filter(one => one.bytes > 0);
    return {event, time: run.time[event], level: run.level[event], rows: rows.sort((a, b) => b.bytes - a.bytes)};
  }

  function largest(run, {x0, x1, axis}) {             // of those that match and are alive in this part
    const first = Math.max(0, eventAt(run, axis, x0) - 1), after = eventAt(run, axis, x1), kept = [];
    let least = -1;
    for (let i = 0; i < run.count && run.begin[i] <= after; i++) {
      if (run.end[i] <= first || run.size[i] <= least || !run.matches[run.origin[i]]) continue;
      kept.push(i);
      if (kept.length >= 40 * LARGEST) {
        kept.sort((a, b) => run.size[b] - run.size[a]).length = LARGEST;
        least = run.size[kept[LARGEST - 1]];
      }
    }
    kept.sort((a, b) => run.size[b] - run.size[a] || a - b);
    const blocks = new Set();
    return kept.filter(i => !blocks.has(run.block[i]) && blocks.add(run.block[i])).slice(0, LARGEST).map(piece => facts(run, {piece}));
  }

  function range(run, {x0, x1, axis}) {               // events from x0 on and before x1
    const first = eventAt(run, axis, x0), after = eventAt(run, axis, x1);
    let best = first < after ? first : Math.max(0, first - 1);
    for (let event = best + 1; event < after; event++) if (run.level[event] > run.level[best]) best = event;
    const found = {events: after - first, allocated: 0, allocatedBytes: 0, freed: 0, freedBytes: 0, laterBytes: 0, before: run.level[Math.max(0, first - 1)],
      after: run.level[Math.max(0, after - 1)], peak: run.level[best], peakTime: run.time[best], peakEvent: best};
    const by = ['line', 'module'].includes(setLayers.by) ? setLayers.by : run.texts.line.length > 1 ? 'line' : 'module';
    const {numbers, names} = namesOf(run, by), stays = new Float64Array(names.length), counts = new Int32Array(names.length);
    for (let i = 0; i < run.count && run.begin[i] < after; i++) {
      const all = run.several ? run.several.get(run.block[i]) : null;
      const end = all ? run.end[all[all.length - 1]] : run.end[i];
      if (!isFirst(run, i)) continue;
      const isNew = run.begin[i] >= first && !run.of.old[run.origin[i]], isGone = end >= first && end < after;
      if (isNew) { found.allocated++; found.allocatedBytes += run.size[i]; }
      if (isGone) { found.freed++; found.freedBytes += run.size[i]; }
      if (isNew && end >= run.events) { stays[numbers[run.origin[i]]] += run.size[i]; counts[numbers[run.origin[i]]]++; }
      else if (isNew && end >= after) found.laterBytes += run.size[i];
    }
    const rows = names.map((name, i) => ({name, bytes: stays[i], count: counts[i]})).filter(one => one.count);
    rows.sort((a, b) => b.bytes - a.bytes);
    return {...found, by, rows: rows.slice(0, LISTED), others: rows.length - Math.min(rows.length, LISTED)};
  }

  const answers = {
    async open({data, colours: all}) {
      colours = all;
      runs = [];
      for (const one of data) runs.push(await readRun(one));
      runs.forEach(findSeveral);
      const shown = ({title, events, blocks, end_s, has_times, peak, capacity, unseen, ooms, lost, top, time, highest}) =>
        ({title, events, blocks, end_s, has_times, peak, capacity, unseen, lost, top, highest, peakTime: time[highest],
          ooms: ooms.map(([event, bytes]) => ({event, bytes, time: time[event]}))});
      return {layers: setLayers('category'), runs: runs.map(shown), hasPhases: runs.some(run => run.phaseTime.length),
        texts: Object.fromEntries(TEXTS.map(name => [name, runs.some(run => run.texts[name].length > 1)]))};
    },
    layers: ({by}) => setLayers(by), search,
  };
  const ofOneRun = {picture, facts, layersAt, largest, range};
  return async (what, options) => ofOneRun[what] ? ofOneRun[what](runs[options.run], options) : answers[what](options);
}

class Engine {                                       // answers questions about the runs: a worker, or this thread where workers are refused
  constructor(data, colours) { Object.assign(this, {options: {data, colours}, repeated: {}, waiting: new Map(), last: 0, opening: null}); }
  open() { return this.opening ||= this.reopened(); }

  async reopened() {                                 // what a closed worker knew is said again to the next one
    const opened = await this.start();
    for (const [what, options] of Object.entries(this.repeated)) await this.call(what, options);
    return opened;
  }

  async start() {
    try {
      const code = `const answer = (${makeEngine})();
        onmessage = async ({data: {id, what, options}}) => {
          try {
            const result = await answer(what, options);
            postMessage({id, result}, result && result.pixels ? [result.pixels.buffer, result.blocks.buffer] : []);
          } catch (error) { postMessage({id, error: String(error)}); }
        };`;
      const url = URL.createObjectURL(new Blob([code], {type: 'text/javascript'})), worker = new Worker(url);
      const refused = new Promise((_, no) => { worker.onerror = no; });
      worker.onmessage = ({data: {id, result, error}}) => {
        const [yes, no] = this.waiting.get(id);
        this.waiting.delete(id);
        if (error) no(new Error(error)); else yes(result);
      };
      this.call = (what, options) => new Promise((yes, no) => {
        this.waiting.set(++this.last, [yes, no]);
        worker.postMessage({id: this.last, what, options});
      });
      this.close = () => { if (!this.waiting.size) { worker.terminate(); this.opening = null; } };
      const opened = await Promise.race([this.call('open', this.options), refused]);
      URL.revokeObjectURL(url);
      return opened;
    } catch (error) {
      this.call = makeEngine();
      this.close = () => { this.opening = this.call = null; };
      return this.call('open', this.options);
    }
  }

  async ask(what, options) {
    await this.open();
    if (what === 'layers' || what === 'search') this.repeated[what] = options;
    return this.call(what, options);
  }
}

// --- on the page ------------------------------------------------------------------------------------------------------------------

const LEFT = 70, RIGHT = 14, TOP = 18, BOTTOM = 30, STRIP = 6, CLICK_PX = 4, GONE_MS = 60000, HIDDEN_MS = 500;
const HINT = 'click a block · drag to move · shift-drag to select a range · after a click the wheel zooms, with shift the height · double-click for the whole run';
const BY = [['category', 'Categories'], ['module', 'Modules'], ['repeated', 'Modules, repeated ones together'], ['line', 'Lines'],
  ['phase', 'Phases'], ['none', 'Order of allocation']];

const countText = (count, name) => `${count.toLocaleString('en')} ${name}${count === 1 ? '' : 's'}`;

function secondsText(seconds, width = seconds) {     // as many digits as tell apart what is seen
  const [scale, unit] = width < 1e-3 ? [1e6, 'µs'] : width < 1 ? [1e3, 'ms'] : [1, 's'];
  const digits = Math.min(6, Math.max(0, Math.ceil(2.5 - Math.log10(Math.max(scale * width, 1e-9)))));
  return `${(scale * seconds).toFixed(digits)} ${unit}`;
}

function abgr(colour, towards = 255, share = 0, alpha = 255) {   // a pixel of ImageData from #rrggbb, mixed with a grey
  const channel = at => Math.round(parseInt(colour.slice(at, at + 2), 16) * (1 - share) + towards * share);
  return ((alpha << 24) | (channel(5) << 16) | (channel(3) << 8) | channel(1)) >>> 0;
}

const percentText = share => share > 0 && share < 0.005 ? '<1 %' : `${(100 * share).toFixed(0)} %`;

function barTable(parent, rows, total, onName) {     // [{name, bytes, colour, count}] with bars, the names as buttons
  const table = make('table', 'memlab-bars', undefined, parent);
  for (const {name, bytes, colour, count} of rows) {
    const row = make('tr', '', undefined, table), head = make('th', '', undefined, row);
    head.scope = 'row';
    if (colour) make('i', '', undefined, head).style.background = colour;
    const button = make('button', 'memlab-link', name, head);
    button.onclick = () => onName(name);
    button.title = `Show only ${name}`;
    make('td', '', bytesText(bytes), row);
    make('td', 'memlab-quiet', count === undefined ? percentText(bytes / Math.max(total, 1)) : countText(count, 'block'), row);
    const bar = make('i', 'memlab-bar', undefined, make('td', '', undefined, row));
    bar.style.width = `${(90 * bytes / Math.max(rows[0].bytes, 1)).toFixed(1)}px`;
    bar.style.background = colour || '#7c818b';
  }
  return table;
}

class Plot {                                         // the picture of one run: moves what was painted until the next picture comes
  constructor(number, run, explorer, parent) {
    Object.assign(this, {number, run, explorer, picture: null, isBusy: false, hovered: NaN});
    this.box = make('div', 'memlab-plot', undefined, parent);
    this.canvas = Object.assign(make('canvas', 'memlab-canvas', undefined, this.box), {tabIndex: 0});
    this.canvas.setAttribute('role', 'img');
    const peak = `${run.peak.exact ? '' : 'at least '}${bytesText(run.peak.bytes)}`;
    this.canvas.setAttribute('aria-label', `Memory of ${run.title}: ${countText(run.blocks, 'block')}, peak ${peak}. ` +
      'Arrows left and right move, plus and minus zoom, up and down zoom the height, 0 shows the whole run, P the peak. The blocks are in the table below.');
    this.tip = Object.assign(make('div', 'memlab-tip', undefined, this.box), {hidden: true});
    this.painted = document.createElement('canvas');
    this.height = explorer.opened.runs.length > 1 ? 230 : 340;
    this.listen();
  }

  get width() { return Math.max(100, this.box.clientWidth - LEFT - RIGHT); }
  get inner() { return this.height - TOP - BOTTOM; }

  request() {                                        // one picture at a time, then the newest wish
    const {view} = this.explorer, ratio = Math.min(2, devicePixelRatio || 1);
    this.isStale = true;
    if (this.isBusy) return;
    if (!this.box.clientWidth) {                     // hidden, perhaps for less than the observer of its size notices
      clearTimeout(this.later);
      this.later = setTimeout(() => this.request(), HIDDEN_MS);
      return;
    }
    const asked = performance.now();
    this.isBusy = true;
    this.isStale = false;
    const seen = {...view, y1: view.y1 ?? this.explorer.sharedTop, width: Math.round(this.width * ratio), height: Math.round(this.inner * ratio), roomy: this.explorer.roomy,
      selected: this.explorer.selected && this.explorer.selected.run === this.number ? this.explorer.selected.block : -1,
      colours: this.explorer.pixelColours(), isSearch: this.explorer.isSearch};
    this.explorer.engine.ask('picture', {run: this.number, view: seen}).then(picture => {
      this.isBusy = false;
      this.picture = picture;
      this.explorer.counters.pictures++;
      this.explorer.counters.pictureMs?.push(performance.now() - asked);
      const {width, height} = picture.view;
      if (this.painted.width !== width || this.painted.height !== height) Object.assign(this.painted, {width, height});
      this.painted.getContext('2d').putImageData(new ImageData(new Uint8ClampedArray(picture.pixels.buffer), width, height), 0, 0);
      this.explorer.redraw();
      if (this.isStale) this.request();
    }).catch(error => { this.isBusy = false; this.explorer.fail(error); });
  }

  get yRange() {                                     // while nothing is fixed, that of the last picture
    const {y0, y1} = this.explorer.view;
    return y1 !== null ? [y0, y1] : this.picture ? [this.picture.y0, this.picture.y1] : [0, this.run.top * 1.1];
  }

  x(value) { const {x0, x1} = this.explorer.view; return LEFT + (value - x0) / (x1 - x0) * this.width; }
  y(bytes) { const [low, high] = this.yRange; return TOP + this.inner * (1 - (bytes - low) / (high - low)); }
  valueAt(x) { const {x0, x1} = this.explorer.view; return x0 + (x - LEFT) / this.width * (x1 - x0); }
  position(event, time) { return this.explorer.view.axis === 'time' ? time : event; }

  draw() {
    const ratio = Math.min(2, devicePixelRatio || 1), {canvas, picture, width, inner} = this, whole = this.box.clientWidth;
    const pixelWidth = Math.round(whole * ratio), pixelHeight = Math.round(this.height * ratio);
    if (canvas.width !== pixelWidth || canvas.height !== pixelHeight) {
      Object.assign(canvas, {width: pixelWidth, height: pixelHeight});
      canvas.style.height = `${this.height}px`;
    }
    const g = canvas.getContext('2d'), {view, range} = this.explorer;
    g.setTransform(ratio, 0, 0, ratio, 0, 0);
    g.clearRect(0, 0, whole, this.height);
    g.font = `11px ${this.explorer.font}`;
    g.textBaseline = 'middle';
    this.drawGrid(g);
    g.save();
    g.beginPath(); g.rect(LEFT, TOP, width, inner + STRIP + 2); g.clip();
    if (picture) {
      const seen = picture.view, left = this.x(seen.x0), top = this.y(picture.y1), bottom = this.y(picture.y0);
      g.imageSmoothingEnabled = false;
      g.drawImage(this.painted, left, top, this.x(seen.x1) - left, bottom - top);
      this.drawPhases(g, picture);
    }
    this.drawMarks(g);
    if (range) {
      const [from, to] = [this.x(range[0]), this.x(range[1])].sort((a, b) => a - b);
      g.fillStyle = ink(canvas, 0.14); g.fillRect(from, TOP, to - from, inner);
      g.strokeStyle = ink(canvas, 0.6); g.strokeRect(from, TOP - 1, to - from, inner + 2);
    }
    g.restore();
    g.fillStyle = ink(canvas, 0.9);
    g.textAlign = 'left';
    if (this.explorer.plots.length > 1) g.fillText(this.run.title, LEFT, 8, width);
  }

  drawGrid(g) {
    const [low, high] = this.yRange, {view} = this.explorer, {width, inner} = this;
    const step = 2 ** Math.ceil(Math.log2((high - low) / Math.max(2, inner / 40))), ticks = [];
    for (let tick = Math.ceil(low / step) * step; tick <= high; tick += step) ticks.push(tick);
    const names = memlabChart.byteTicks(null, ticks.length ? ticks : [high]);
    g.textAlign = 'right';
    ticks.forEach((tick, i) => {
      const y = Math.round(this.y(tick)) + 0.5;
      g.strokeStyle = ink(this.canvas, 0.1); g.beginPath(); g.moveTo(LEFT, y); g.lineTo(LEFT + width, y); g.stroke();
      g.fillStyle = ink(this.canvas, 0.62); g.fillText(names[i], LEFT - 6, y);
    });
    const wanted = (view.x1 - view.x0) / Math.max(2, width / 110), isTime = view.axis === 'time';
    const ten = 10 ** Math.floor(Math.log10(wanted)), stepX = [1, 2, 5, 10].find(one => one * ten >= wanted) * ten;
    g.textAlign = 'center';
    const places = [];
    for (let k = Math.ceil(view.x0 / stepX); k * stepX <= view.x1; k++) places.push(k * stepX);
    const shown = isTime ? memlabChart.timeTicks(null, places) : places.map(tick => tick.toLocaleString('en', {maximumFractionDigits: 1}));
    if (!isTime && places[0] === 0) shown[0] = '0 events';
    places.forEach((tick, i) => g.fillText(shown[i], Math.min(this.x(tick), LEFT + width - 14), TOP + inner + STRIP + 14));
  }

  drawPhases(g, {phases, view}) {
    const pixels = phases.length, step = (this.x(view.x1) - this.x(view.x0)) / pixels, from = this.x(view.x0), named = this.explorer.colours.phases;
    for (let first = 0, column = 1; column <= pixels; column++) {
      if (column < pixels && phases[column] === phases[first]) continue;
      if (phases[first]) {
        g.fillStyle = named[phases[first]][1];
        g.fillRect(from + first * step, TOP + this.inner + 2, (column - first) * step, STRIP - 2);
      }
      first = column;
    }
  }

  drawMarks(g) {                                     // capacity, missing events, out of memory, the peak and the chosen moment
    const {run, canvas, inner, width} = this, {view, colours, moment} = this.explorer;
    const label = (text, x, y, colour) => {
      g.textAlign = x > LEFT + width - g.measureText(text).width - 10 ? 'right' : 'left';
      const at = x + (g.textAlign === 'right' ? -6 : 6), size = g.measureText(text).width, from = g.textAlign === 'right' ? at - size : at;
      g.fillStyle = this.explorer.paper; g.fillRect(from - 2, y - 7, size + 4, 14);
      g.fillStyle = colour; g.fillText(text, at, y);
    };
    const line = (x0, y0, x1, y1, colour, dashes) => {
      g.strokeStyle = colour; g.setLineDash(dashes); g.beginPath(); g.moveTo(x0, y0); g.lineTo(x1, y1); g.stroke(); g.setLineDash([]);
    };
    if (view.axis === 'time') {
      g.fillStyle = ink(canvas, 0.12);
      for (const [from, to] of run.lost) g.fillRect(this.x(from), TOP, Math.max(1, this.x(to) - this.x(from)), inner);
    }
    const [low, high] = this.yRange;
    if (run.capacity > low && run.capacity < high) {
      line(LEFT, this.y(run.capacity), LEFT + width, this.y(run.capacity), colours.capacity, []);
      const y = this.y(run.capacity);
      label(`capacity ${bytesText(run.capacity)}`, LEFT, y < TOP + 16 ? y + 9 : y - 9, colours.capacity);  // never cut by the top
    }
    run.ooms.forEach((oom, i) => {
      const x = this.x(this.position(oom.event, oom.time));
      line(x, TOP, x, TOP + inner, colours.capacity, [2, 2]);
      if (i === 0) label(`out of memory${run.ooms.length > 1 ? ` (first of ${run.ooms.length})` : ''}: ${bytesText(oom.bytes)} requested`, x, TOP + inner - 9, colours.capacity);
    });
    if (moment && moment.run === this.number) {
      const x = this.x(this.position(moment.event, moment.time));
      line(x, TOP, x, TOP + inner, ink(canvas, 0.75), [4, 3]);
    }
    if (run.peak.event >= 0) {
      const x = this.x(this.position(run.peak.event, run.peakTime)), y = this.y(run.peak.bytes);
      if (x < LEFT || x > LEFT + width) return;
      g.fillStyle = colours.peak; g.beginPath(); g.arc(x, y, 3.5, 0, 7); g.fill();
      label(`peak ${run.peak.exact ? '' : '≥ '}${bytesText(run.peak.bytes)}`, x, Math.max(y - 9, TOP + 7), colours.peak);
    }
  }

  pixel(x, y) {                                      // of the painted picture under a point of the canvas
    const {picture} = this;
    if (!picture || x < LEFT || x > LEFT + this.width || y < TOP || y > TOP + this.inner) return null;
    const {view} = picture, from = this.x(view.x0), column = Math.floor((x - from) / (this.x(view.x1) - from) * view.width);
    const top = this.y(picture.y1), row = Math.floor((y - top) / (this.y(picture.y0) - top) * view.height);
    if (column < 0 || column >= view.width || row < 0 || row >= view.height) return null;
    return {column, event: picture.moments[column], piece: picture.blocks[row * view.width + column]};
  }

  async hover(x, y) {
    const found = this.pixel(x, y), piece = found ? found.piece : -1;
    this.tip.hidden = piece === -1;
    if (!found || piece === -1) { this.hovered = NaN; return; }
    const place = () => {
      this.tip.style.left = `${Math.min(x + 14, Math.max(0, this.box.clientWidth - this.tip.offsetWidth - 4))}px`;
      this.tip.style.top = `${Math.max(0, Math.min(y + 14, this.height - this.tip.offsetHeight))}px`;
    };
    if (piece < -1) {
      const layer = -2 - piece, bytes = this.picture.small[layer * this.picture.view.width + found.column];
      write(this.tip, `${this.explorer.layers[layer].name}: ${bytesText(bytes)} in blocks that are too small to draw here. Zoom the height (shift and wheel) to see them.`);
    } else if (piece !== this.hovered) {
      this.hovered = piece;
      const facts = await this.explorer.engine.ask('facts', {run: this.number, piece});
      if (this.hovered !== piece) return;
      write(this.tip, `${bytesText(facts.size)} · ${this.explorer.title(facts)}\n` + [facts.category, facts.phase, facts.module, facts.line].filter(Boolean).join(' · ') +
        `\n${this.explorer.life(this.run, facts)}`);
    }
    place();
  }

  listen() {
    const {canvas, explorer} = this, point = event => [event.offsetX, event.offsetY];
    let drag = null;
    canvas.addEventListener('pointerdown', event => {
      if (event.button) return;
      canvas.setPointerCapture(event.pointerId);
      const {view} = explorer, [x, y] = point(event);
      drag = {x, y, view: {...view}, range: this.yRange, isRange: event.shiftKey || explorer.isSelecting, isMoved: false};
    });
    canvas.addEventListener('pointermove', event => {
      const [x, y] = point(event);
      if (!drag) { this.hover(x, y); return; }
      drag.isMoved ||= Math.abs(x - drag.x) > CLICK_PX || Math.abs(y - drag.y) > CLICK_PX;
      if (!drag.isMoved) return;
      this.tip.hidden = true;
      if (drag.isRange) { explorer.range = [this.valueAt(drag.x), this.valueAt(Math.min(Math.max(x, LEFT), LEFT + this.width))]; explorer.redraw(); return; }
      const by = (drag.x - x) / this.width * (drag.view.x1 - drag.view.x0), height = drag.range[1] - drag.range[0];
      const up = drag.view.y1 === null ? 0 : (y - drag.y) / this.inner * height;
      explorer.show({x0: drag.view.x0 + by, x1: drag.view.x1 + by, ...(up ? {y0: drag.view.y0 + up, y1: drag.view.y1 + up} : {})});
    });
    canvas.addEventListener('pointerup', event => {
      const was = drag;
      drag = null;
      if (!was) return;
      if (!was.isMoved) { const found = this.pixel(...point(event)); explorer.choose(this.number, found ? found.piece : -1, found ? found.event : -1); }
      else if (was.isRange) explorer.summarizeRange(this.number);
    });
    canvas.addEventListener('pointercancel', () => { drag = null; });
    canvas.addEventListener('pointerleave', () => { this.tip.hidden = true; this.hovered = NaN; });
    canvas.addEventListener('dblclick', () => explorer.whole());
    canvas.addEventListener('wheel', event => {      // before a click the wheel scrolls the page
      if (document.activeElement !== canvas && !event.ctrlKey && canvas.getRootNode().activeElement !== canvas) return;
      event.preventDefault();
      const [x, y] = point(event), delta = event.deltaY || event.deltaX, factor = 1.0018 ** Math.max(-200, Math.min(200, delta));
      if (event.shiftKey) { const [low, high] = this.yRange; this.zoomHeight(factor, low + (TOP + this.inner - y) / this.inner * (high - low)); }
      else explorer.zoom(factor, this.valueAt(x));
    }, {passive: false});
    canvas.addEventListener('keydown', event => {
      const keys = {ArrowLeft: () => explorer.move(-0.2), ArrowRight: () => explorer.move(0.2), '+': () => explorer.zoom(0.5), '=': () => explorer.zoom(0.5),
        '-': () => explorer.zoom(2), ArrowUp: () => this.zoomHeight(0.7), ArrowDown: () => this.zoomHeight(1 / 0.7), 0: () => explorer.whole(),
        p: () => explorer.toPeak(this.number), Escape: () => explorer.clear()};
      if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault(); event.stopPropagation();
      keys[event.key]();
    });
  }

  zoomHeight(factor, around) {
    const [low, high] = this.yRange, middle = around ?? (low + high) / 2;
    const y0 = Math.max(0, middle - (middle - low) * factor), y1 = middle + (high - middle) * factor;
    const isWhole = y0 <= 0 && y1 >= this.explorer.highest * 1.1;
    if (y1 - y0 >= 64) this.explorer.show(isWhole ? {y0: 0, y1: null} : {y0, y1});
  }
}

class Explorer {
  constructor(root, engine, opened, colours) {
    Object.assign(this, {root, engine, opened, colours, layers: opened.layers, range: null, selected: null, moment: null, isSelecting: false,
      isSearch: false, by: 'category', frame: 0});
    this.highest = Math.max(...opened.runs.map(run => run.top));
    this.roomy = Array.from({length: 400}, (_, i) => 1024 * (8 + i % 8) / 8 * 2 ** Math.floor(i / 8)).filter(one => one < this.highest * 4);
    this.sharedTop = opened.runs.length > 1 ? memlabChart.roomyTop(this.highest) : null;   // two runs have one scale
    const hasTimes = opened.runs.every(run => run.has_times);
    this.view = {axis: hasTimes ? 'time' : 'order', x0: 0, x1: 1, y0: 0, y1: null};
    this.counters = root.memlabExplorer = {pictures: 0, explorer: this};
    this.build(hasTimes);
    this.whole();
    this.showMoment(0, opened.runs[0].highest);
  }

  build(hasTimes) {
    const {root, opened} = this, title = opened.runs.map(run => run.title).join(' and ');
    const head = make('div', 'memlab-head', undefined, root), tools = make('div', 'memlab-tools', undefined, root);
    make('span', 'memlab-title', title, head);
    const label = text => make('label', 'memlab-quiet', `${text} `, tools);
    this.select = make('select', 'memlab-field', undefined, label('Layers'));
    for (const [value, name] of BY) {
      if ((value === 'line' && !opened.texts.line) || (['module', 'repeated'].includes(value) && !opened.texts.module)) continue;
      if (value === 'phase' && !opened.hasPhases) continue;
      make('option', '', name, this.select).value = value;
    }
    this.select.onchange = () => this.setLayers(this.select.value);
    if (hasTimes) {
      const axis = make('select', 'memlab-field', undefined, label('Axis'));
      for (const [value, name] of [['time', 'Time'], ['order', 'Order of events']]) make('option', '', name, axis).value = value;
      axis.onchange = () => { this.view.axis = axis.value; this.range = null; this.whole(); };
    }
    this.field = make('input', 'memlab-field', undefined, label('Search'));
    Object.assign(this.field, {type: 'search', placeholder: 'module, line, operator …', size: 24});
    let typing = 0;
    this.field.oninput = () => { clearTimeout(typing); typing = setTimeout(() => this.search({words: this.field.value}), 200); };
    this.found = make('span', 'memlab-number memlab-quiet', '', tools);
    this.found.setAttribute('role', 'status');
    const buttons = make('span', 'memlab-buttons memlab-right', undefined, tools);
    const button = (text, name, action) => {
      const element = make('button', 'memlab-button', text, buttons);
      Object.assign(element, {title: name, onclick: action});
      element.setAttribute('aria-label', name);
      return element;
    };
    this.rangeButton = button('Range', 'Select a range by dragging', () => this.setSelecting(!this.isSelecting));
    this.rangeButton.setAttribute('aria-pressed', 'false');
    button('−', 'Zoom out', () => this.zoom(2)); button('+', 'Zoom in', () => this.zoom(0.5));
    button('Peak', 'Show the peak', () => this.toPeak(this.moment ? this.moment.run : 0));
    button('Whole run', 'Show the whole run', () => this.whole());
    this.said = make('div', 'memlab-said', '', root);
    this.said.setAttribute('role', 'alert');
    this.plots = opened.runs.map((run, number) => new Plot(number, run, this, root));
    if (opened.hasPhases) {
      const chips = make('div', 'memlab-foot', undefined, root);
      for (const [name, colour] of this.colours.phases.slice(1)) {
        const chip = make('span', 'memlab-chip', undefined, chips);
        make('i', '', undefined, chip).style.background = colour;
        chip.append(name);
      }
    }
    make('div', 'memlab-hint memlab-quiet', HINT, root);
    const below = make('div', 'memlab-below', undefined, root);
    this.held = make('div', '', undefined, below);
    this.details = make('div', '', undefined, below);
    this.details.setAttribute('aria-live', 'polite');
    this.list = make('details', '', undefined, root);
    make('summary', '', 'Largest blocks of what is seen', this.list);
    this.rows = make('div', '', undefined, this.list);
    this.list.ontoggle = () => this.fillList();
    for (const run of opened.runs)
      if (run.unseen) make('div', 'memlab-quiet', `${run.title}: ${countText(run.unseen, 'block')} whose allocation was not seen ${run.unseen === 1 ? 'is' : 'are'} not drawn.`, root);
    const themes = new MutationObserver(() => this.restyle());
    themes.observe(document.body, {attributes: true, attributeFilter: ['data-jp-theme-light', 'data-jp-theme-name', 'class']});
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => this.restyle());
    let gone = 0;
    new ResizeObserver(() => {                       // a notebook takes cells off the page that are not seen; a deleted one never comes back
      clearTimeout(gone);
      if (root.isConnected) this.requestAll(); else gone = setTimeout(() => this.engine.close(), GONE_MS);
    }).observe(root);
    this.restyle();
  }

  fail(error) { write(this.said, `The explorer failed: ${error.message || error}`); }

  restyle() {
    const style = getComputedStyle(this.root), numbers = style.color.match(/[\d.]+/g) || [0, 0, 0];
    this.font = style.fontFamily;
    this.isDark = (+numbers[0] + +numbers[1] + +numbers[2]) > 384;
    this.paper = getComputedStyle(document.body).getPropertyValue('--jp-layout-color0').trim() || (this.isDark ? '#111' : '#fff');
    this.requestAll();
  }

  pixelColours() {
    return {
      shades: this.layers.map(({colour}) => [abgr(colour), abgr(colour, 255, 0.2), abgr(colour, this.isDark ? 0 : 255, 0.5), abgr(colour, 255, 0, 120), abgr(colour, this.isDark ? 255 : 0, 0.4)]),
      faded: abgr('#808080', 0, 0, 50), chosen: abgr(this.isDark ? '#ffffff' : '#000000'),
    };
  }

  get end() { return Math.max(...this.opened.runs.map(run => this.view.axis === 'time' ? run.end_s : run.events)); }

  show(change) {
    const wanted = {...this.view, ...change}, least = this.view.axis === 'time' ? this.end * 1e-7 : 4;
    const width = Math.min(this.end, Math.max(least, wanted.x1 - wanted.x0));
    wanted.x0 = Math.min(Math.max(0, wanted.x0), this.end - width);
    wanted.x1 = wanted.x0 + width;
    if (wanted.y1 !== null && wanted.y0 < 0) Object.assign(wanted, {y1: wanted.y1 - wanted.y0, y0: 0});
    this.view = wanted;
    this.requestAll();
    this.redraw();
    clearTimeout(this.listing);
    this.listing = setTimeout(() => this.fillList(), 300);
  }

  zoom(factor, around = (this.view.x0 + this.view.x1) / 2) {
    const {x0, x1} = this.view;
    this.show({x0: around - (around - x0) * factor, x1: around + (x1 - around) * factor});
  }

  move(share) { const by = share * (this.view.x1 - this.view.x0); this.show({x0: this.view.x0 + by, x1: this.view.x1 + by}); }
  whole() { this.show({x0: 0, x1: this.end, y0: 0, y1: null}); }
  requestAll() { for (const plot of this.plots || []) plot.request(); }

  toPeak(number) {
    const run = this.opened.runs[number], at = this.plots[number].position(run.highest, run.peakTime), {x0, x1} = this.view;
    if (at < x0 || at > x1) this.show({x0: at - (x1 - x0) / 2, x1: at + (x1 - x0) / 2});
    this.showMoment(number, run.highest);
  }

  redraw() {
    this.frame ||= requestAnimationFrame(() => {
      const begin = performance.now();
      this.frame = 0;
      for (const plot of this.plots) if (plot.box.clientWidth) plot.draw();
      this.counters.drawMs?.push(performance.now() - begin);
    });
  }

  momentText(run, event, time) { return run.has_times ? secondsText(time, Math.min(time || 1, this.view.axis === 'time' ? this.view.x1 - this.view.x0 : run.end_s)) : `event ${event.toLocaleString('en')}`; }

  life(run, facts) {
    const from = facts.old ? 'allocated before the run' : `allocated at ${this.momentText(run, facts.begin, facts.begin_s)}`;
    if (facts.end_s === null) return `${from}, not freed in the run`;
    const lasted = run.has_times ? `${secondsText(facts.end_s - facts.begin_s)}, ` : '';
    return `${from}, freed at ${this.momentText(run, facts.end, facts.end_s)} (lived ${lasted}${countText(facts.end - facts.begin, 'event')})`;
  }

  title(facts) { return [facts.name || facts.op || 'unnamed tensor', facts.shape, facts.dtype].filter(Boolean).join(' '); }

  async showMoment(number, event) {
    const run = this.opened.runs[number], found = await this.engine.ask('layersAt', {run: number, event});
    this.moment = {run: number, event, time: found.time};
    const colours = new Map(this.layers.map(({name, colour}) => [name, colour])), others = this.layers.find(one => one.name === 'others');
    const rows = found.rows.map(row => ({...row, colour: colours.get(row.name) || (others || {}).colour}));
    const several = this.opened.runs.length > 1 ? `${run.title}: ` : '', isPeak = event === run.highest;
    this.held.replaceChildren();
    make('h4', '', `${several}${several ? 'held' : 'Held'} at ${isPeak ? `the${run.peak.exact ? '' : ' known'} peak, ` : ''}${this.momentText(run, event, found.time)}: ${bytesText(found.level)}`, this.held);
    barTable(this.held, rows.slice(0, 14), found.level, name => this.search({name, by: this.by}));
    const rest = rows.slice(14);
    if (rest.length) make('div', 'memlab-quiet', `${rest.length.toLocaleString('en')} more: ${bytesText(rest.reduce((sum, row) => sum + row.bytes, 0))}`, this.held);
    this.redraw();
  }

  async choose(number, piece, event) {
    if (event >= 0) this.showMoment(number, event);
    if (piece < 0) { if (this.selected) this.clear(); return; }
    const facts = await this.engine.ask('facts', {run: number, piece}), run = this.opened.runs[number], box = this.details;
    Object.assign(this, {selected: {run: number, block: facts.block}, range: null});
    this.requestAll();
    box.replaceChildren();
    make('h4', '', `${bytesText(facts.size)} · ${this.title(facts)}`, box);
    const rows = make('dl', '', undefined, box);
    const row = (name, text) => text && make('dt', 'memlab-quiet', name, rows) && make('dd', '', text, rows);
    const link = (name, text, by) => {
      if (!text) return;
      const button = make('button', 'memlab-link', text, row(name, ' '));
      Object.assign(button, {title: `Show only ${text}`, onclick: () => this.search({name: text, by})});
    };
    if (this.opened.runs.length > 1) row('Run', run.title);
    row('Size', `${facts.size.toLocaleString('en')} B${facts.requested === facts.size ? '' : `, ${facts.requested.toLocaleString('en')} B of them requested`}`);
    row('Category', facts.categories.map(([name, at], i) => i ? `${name} from ${this.momentText(run, 0, at)} on` : name).join(', then '));
    link('Module', facts.module, 'module');
    link('Line', facts.line, 'line');
    row('Operator', facts.op);
    row('Phase', facts.old ? '' : facts.phase);
    row('Life', this.life(run, facts));
    const alive = facts.end_s !== null ? 'Freed in the run.' : facts.holders === null ? 'Not freed in the run. Whether it is alive now is only known in the process that measured it.'
      : facts.holders.length ? '' : 'Not freed in the run. When the explorer was opened, no tensor of this size was found at its address.';
    row('Kept alive by', alive || facts.holders.join('\n')).classList.add('memlab-paths');
    if (facts.stack) {
      const stack = Object.assign(make('details', '', undefined, box), {open: true});
      make('summary', '', 'Stack, innermost first', stack);
      make('pre', 'memlab-stack', facts.stack, stack);
    }
    const buttons = make('div', 'memlab-buttons', undefined, box);
    const end = facts.end_s === null ? (this.view.axis === 'time' ? run.end_s : run.events) : this.plots[number].position(facts.end, facts.end_s);
    const from = this.plots[number].position(facts.begin, facts.begin_s), margin = (end - from) * 0.1;
    make('button', 'memlab-button', 'Zoom to its life', buttons).onclick = () => this.show({x0: from - margin, x1: end + margin});
  }

  clear() {
    Object.assign(this, {selected: null, range: null});
    this.details.replaceChildren();
    this.requestAll();                               // and the new picture redraws
  }

  setSelecting(isOn) { this.isSelecting = isOn; this.rangeButton.setAttribute('aria-pressed', String(isOn)); }

  async summarizeRange() {
    const [x0, x1] = this.range.sort((a, b) => a - b), {axis} = this.view, box = this.details;
    this.setSelecting(false);
    const all = await Promise.all(this.plots.map((_, run) => this.engine.ask('range', {run, x0, x1, axis})));
    box.replaceChildren();
    all.forEach((found, number) => {
      const run = this.opened.runs[number], several = all.length > 1 ? `${run.title}, ` : '';
      const part = axis === 'time' ? `${secondsText(x0, x1 - x0)} to ${secondsText(x1, x1 - x0)}` : `events ${Math.ceil(x0).toLocaleString('en')} to ${Math.floor(x1).toLocaleString('en')}`;
      make('h4', '', `${several}${part}: ${countText(found.events, 'event')}`, box);
      const change = found.after - found.before, sign = change > 0 ? '+' : change < 0 ? '−' : '';
      make('div', '', `Peak ${bytesText(found.peak)} at ${this.momentText(run, found.peakEvent, found.peakTime)}. Allocated ${countText(found.allocated, 'block')}, ` +
        `${bytesText(found.allocatedBytes)}; freed ${countText(found.freed, 'block')}, ${bytesText(found.freedBytes)}; ` +
        `from ${bytesText(found.before)} to ${bytesText(found.after)} (${sign}${bytesText(Math.abs(change))}).` +
        (found.laterBytes ? ` ${bytesText(found.laterBytes)} that were allocated in it were freed after it.` : ''), box);
      make('div', 'memlab-strong', found.rows.length ? `Allocated in the range and never freed in the run, by ${found.by}:` : 'All that was allocated in the range was freed in the run.', box);
      if (found.rows.length) barTable(box, found.rows, 1, name => this.search({name, by: found.by}));
      if (found.others > 0) make('div', 'memlab-quiet', `and ${countText(found.others, 'more ' + found.by)}`, box);
    });
    this.redraw();
  }

  async setLayers(by) {
    this.by = by;
    this.layers = await this.engine.ask('layers', {by});
    this.requestAll();
    if (this.moment) await this.showMoment(this.moment.run, this.moment.event);
    if (this.range) this.summarizeRange();
  }

  async search(wanted) {
    if (wanted.name !== undefined) this.field.value = wanted.name;
    this.isSearch = wanted.name !== undefined || !!wanted.words.trim();
    const found = await this.engine.ask('search', wanted);
    const text = found.map(({blocks, bytes}) => `${countText(blocks, 'block')}, ${bytesText(bytes)} at the peak`).join(' · ');
    write(this.found, this.isSearch ? text : '');
    this.requestAll();
    this.fillList();
  }

  async fillList() {
    if (!this.list.open) return;
    const {x0, x1, axis} = this.view;
    const all = await Promise.all(this.plots.map((_, run) => this.engine.ask('largest', {run, x0, x1, axis})));
    const heads = ['size', 'tensor', 'category', 'module', 'line', 'life'];
    this.rows.replaceChildren();
    all.forEach((blocks, number) => {
      const run = this.opened.runs[number], table = make('table', 'memlab-list', undefined, this.rows);
      if (all.length > 1) make('caption', '', run.title, table);
      const head = make('tr', '', undefined, make('thead', '', undefined, table)), body = make('tbody', '', undefined, table);
      for (const name of heads) make('th', '', name, head).scope = 'col';
      for (const facts of blocks) {
        const row = make('tr', '', undefined, body), first = make('td', '', undefined, row);
        make('button', 'memlab-link', bytesText(facts.size), first).onclick = () => this.choose(number, facts.piece, -1);
        for (const text of [this.title(facts), facts.category, facts.module, facts.line, this.life(run, facts)]) make('td', '', text, row);
      }
    });
  }
}

async function startExplorer(root, data, colours) {
  if (!root || root.memlabExplorer) return;
  root.memlabExplorer = {};
  const fallback = root.querySelector('.memlab-static'), engine = new Engine(data, colours);
  try {
    if (typeof DecompressionStream === 'undefined') throw new Error('this browser has no DecompressionStream (Chrome 80, Firefox 113, Safari 16.4 and newer have)');
    const opened = await engine.open();
    new Explorer(root, engine, opened, colours);
    fallback.remove();
  } catch (error) {
    make('div', 'memlab-said', `The explorer cannot be shown: ${error.message || error}`, root).setAttribute('role', 'alert');
  }
}
