// The live view. Each view keeps its own state: anywidget may give a second view of one widget another model object.

const {bytesText, clockText, roomyTop, ink, axes, make, makeRoot, write, transparent, own, watchPage} = memlabChart;
const MOST_POINTS = 20000, MOST_PHASES = 4000, MIXED = 255;
const PLOT_HEIGHT = 230, GUTTER = 156, LABEL_HEIGHT = 17, SHORTEST_SHADE = 2.5, CAPACITY_SHARE = 0.25, FAR_ABOVE = 3;
const LOST = 'The kernel was restarted: this curve and its run end here. Run the cell again.';

// -- what arrives -------------------------------------------------------------------------------------------------------

function newState(setup) {
  return {
    setup, seq: -1, synced: false, data: [[], ...setup.series.map(() => [])], phases: [], elapsed: 0, peak: 0, exact: false,
    notes: [], done: false, tops: [], highestOfDevice: 0, keys: 0, chunks: 0, waited: 0, dropped: 0, drawn: 0, top: 0, isLost: false,
  };
}

function readNumbers(raw, offset, points, phases, rows) {
  const numbers = new Float32Array(raw, offset, points * (1 + rows) + phases * 2);
  const columns = [];
  for (let row = 0; row <= rows; row++) columns.push(numbers.subarray(row * points, (row + 1) * points));
  const begins = numbers.subarray((1 + rows) * points), codes = new Uint8Array(raw, offset + 4 * numbers.length, phases);
  return {columns, phase: i => [begins[i], begins[phases + i], codes[i]]};
}

function addPoints(s, columns, at, from, to) {
  for (let i = from; i < to; i++) {
    s.data[0].push(columns[0][i] + at);
    for (let row = 1; row < columns.length; row++) {
      const value = columns[row][i], missing = Number.isNaN(value);
      s.data[row].push(missing ? null : value);
      if (missing) continue;
      s.tops[row] = Math.max(s.tops[row] || 0, value);
      if (s.setup.series[row - 1].name !== 'rss') s.highestOfDevice = Math.max(s.highestOfDevice, value);
    }
  }
  if (s.data[0].length > MOST_POINTS) s.data = thinned(s.data);
}

function addPhases(s, phase, at, from, to) {
  for (let i = from; i < to; i++) {
    const [begin, end, code] = phase(i), last = s.phases[s.phases.length - 1];
    const row = [begin + at, end + at, code];
    if (last && Math.abs(last[0] - row[0]) < 1e-6 * Math.max(1, row[0])) s.phases.pop();
    s.phases.push(row);
  }
  if (s.phases.length > MOST_PHASES) {               // what is this short is never wide enough to be drawn again
    const shortest = (s.phases[s.phases.length - 1][1] - s.phases[0][0]) / (MOST_PHASES / 2);
    s.phases = s.phases.filter(([begin, end]) => end - begin > shortest);
    s.foldedPhases = true;
  }
}

function thinned(data) {                             // of each four points the lowest and the highest, in their order
  const count = data[0].length, whole = count - 1 - (count - 1) % 4, result = data.map(() => []);
  for (let i = 0; i < whole; i += 4) {
    result[0].push(data[0][i], data[0][i + 3]);
    for (let row = 1; row < data.length; row++) result[row].push(...lowAndHigh(data[row], i));
  }
  for (let row = 0; row < data.length; row++) result[row].push(...data[row].slice(whole));
  return result;
}

function lowAndHigh(values, at) {
  let low = at, high = at;
  for (let i = at + 1; i < at + 4; i++) {
    if (values[i] === null) continue;
    if (values[low] === null || values[i] < values[low]) low = i;
    if (values[high] === null || values[i] > values[high]) high = i;
  }
  return low <= high ? [values[low], values[high]] : [values[high], values[low]];
}

function takeHead(s, head) {
  s.seq = head.seq;
  s.elapsed = head.e ?? s.elapsed;
  s.peak = head.p ?? s.peak;
  s.exact = Boolean(head.x ?? s.exact);
  s.notes = head.notes ?? s.notes;
}

function takeKey(s, view) {
  if (!view || !view.byteLength) return;
  const raw = own(view), headLength = new Uint32Array(raw, 0, 1)[0];
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(raw, 4, headLength)));
  if (head.seq <= s.seq) return;
  const points = head.n + head.tail, phases = head.m + head.mtail;
  const {columns, phase} = readNumbers(raw, 4 + headLength, points, phases, s.setup.series.length);
  const missedNothing = head.seq === s.seq + 1 && s.synced;
  if (!missedNothing) { s.data = s.data.map(() => []); s.phases = []; }
  addPoints(s, columns, head.at, missedNothing ? head.n : 0, points);
  addPhases(s, phase, head.at, missedNothing ? head.m : 0, phases);
  takeHead(s, head);
  s.done = s.done || head.done;
  s.synced = true;
  s.keys++;
}

function takeChunk(s, message, buffers) {            // true where a key frame is needed
  if (message.seq <= s.seq) return false;
  if (!s.synced || message.seq !== s.seq + 1) {
    if (s.chunks) s.dropped++; else s.waited++;      // before the first chunk this is a view that came late
    return true;
  }
  const {columns, phase} = readNumbers(own(buffers[0]), 0, message.n, message.m, s.setup.series.length);
  addPoints(s, columns, message.at, 0, message.n);
  addPhases(s, phase, message.at, 0, message.m);
  takeHead(s, message);
  s.chunks++;
  return false;
}

// -- what is seen -------------------------------------------------------------------------------------------------------

function buildPage(s, el) {
  const root = makeRoot('memlab-live', el), head = make('div', 'memlab-head', undefined, root);
  const page = {root, title: make('span', 'memlab-title', s.setup.title, head)};
  page.elapsed = make('span', 'memlab-number memlab-quiet', '', head);
  page.peak = make('span', 'memlab-number memlab-peak', '', head);
  if (s.setup.remark) make('span', 'memlab-quiet', s.setup.remark, head);
  if (s.setup.can_stop) page.stop = make('button', 'memlab-button', 'Stop', head);
  page.said = make('div', 'memlab-said', '', root);
  page.said.setAttribute('role', 'status');
  page.plot = make('div', 'memlab-plot', undefined, root);
  page.labels = s.setup.series.map(({name, colour}) => {
    const label = make('div', 'memlab-label', undefined, page.plot);
    make('span', '', name, label).style.color = colour;
    return {label, value: make('span', 'memlab-number', '', label)};
  });
  const foot = make('div', 'memlab-foot', undefined, root);
  page.phases = s.setup.phases.map(({name, shade}) => {
    const chip = make('span', 'memlab-chip', undefined, foot);
    make('i', '', undefined, chip).style.background = strongerShade(shade);
    make('span', '', name, chip);
    chip.hidden = true;
    return chip;
  });
  page.short = make('span', 'memlab-quiet', '', foot);
  page.capacity = make('span', 'memlab-quiet memlab-right', '', foot);
  page.notes = make('ul', 'memlab-notes', undefined, root);
  page.notes.setAttribute('aria-live', 'polite');
  return page;
}

function strongerShade(shade) {                      // a swatch of 10 pixels needs more than the background of a plot
  return shade.replace(/[\d.]+\)$/, alpha => `${Math.min(1, 3.5 * parseFloat(alpha))})`);
}

const SAMPLED = ['used', 'rss'];                     // these hold more than PyTorch does

function isFarAbove(s, row) {                        // so high that nothing else could be seen beside it
  const held = Math.max(...s.setup.series.map(({name}, i) => SAMPLED.includes(name) ? 0 : s.tops[i + 1] || 0));
  return held > 0 && SAMPLED.includes(s.setup.series[row - 1].name) && s.tops[row] > FAR_ABOVE * held;
}

function highest(s) {                                // with the peak that is written, which samples may miss
  return Math.max(s.peak, ...s.setup.series.map((_, i) => isFarAbove(s, i + 1) ? 0 : s.tops[i + 1] || 0));
}

function capacityIsDrawn(s) {
  return s.setup.capacity && Math.max(s.highestOfDevice, s.peak) > CAPACITY_SHARE * s.setup.capacity;
}

function shadePhases(s, u) {
  const dense = SHORTEST_SHADE * devicePixelRatio, {top, height} = u.bbox;
  s.seenPhases = new Set();
  s.tooShort = Boolean(s.foldedPhases);
  for (const [begin, end, code] of s.phases) {
    const left = u.valToPos(begin, 'x', true), width = u.valToPos(end, 'x', true) - left, phase = s.setup.phases[code];
    if (code === MIXED || (width < dense && phase?.name !== 'other')) { s.tooShort = true; continue; }
    if (!phase || phase.name === 'other') continue;
    s.seenPhases.add(code);
    u.ctx.fillStyle = phase.shade;
    u.ctx.fillRect(left, top, width, height);
  }
}

function drawCapacity(s, u) {
  if (!capacityIsDrawn(s)) return;
  const {left, width} = u.bbox, y = Math.round(u.valToPos(s.setup.capacity, 'y', true)), ratio = devicePixelRatio, g = u.ctx;
  g.save();
  g.strokeStyle = g.fillStyle = s.setup.capacity_colour;
  g.lineWidth = ratio;
  g.setLineDash([5 * ratio, 4 * ratio]);
  g.beginPath(); g.moveTo(left, y); g.lineTo(left + width, y); g.stroke();
  g.font = u.axes[0].font[0];
  g.textAlign = 'left'; g.textBaseline = 'top';
  g.fillText(`capacity ${bytesText(s.setup.capacity)}`, left + 6 * ratio, y + 4 * ratio);
  g.restore();
}

function placeLabels(s, u, page) {                   // names stand at the ends of their lines, pushed apart where they meet
  const ratio = devicePixelRatio, left = (u.bbox.left + u.bbox.width) / ratio + 8, bottom = (u.bbox.top + u.bbox.height) / ratio;
  const shown = [];
  page.labels.forEach(({label, value}, i) => {
    const row = s.data[i + 1];
    let last = row.length - 1;
    while (last >= 0 && row[last] === null) last--;
    label.hidden = last < 0;
    if (last < 0) return;
    const above = isFarAbove(s, i + 1);
    write(value, `${above ? '↑ ' : ''}${bytesText(row[last])}`);
    shown.push({label, y: (above ? 0 : u.valToPos(row[last], 'y')) + u.bbox.top / ratio});
  });
  shown.sort((a, b) => a.y - b.y);
  let lowest = bottom - LABEL_HEIGHT / 2;
  for (let i = shown.length - 1; i >= 0; i--) { shown[i].y = Math.min(shown[i].y, lowest); lowest = shown[i].y - LABEL_HEIGHT; }
  for (const {label, y} of shown) label.style.transform = `translate(${left}px, ${y - LABEL_HEIGHT / 2}px)`;
}

function writeWords(s, page) {
  write(page.elapsed, s.setup.remark ? '' : clockText(s.elapsed));
  write(page.peak, s.peak ? `peak allocated ${s.done ? '' : 'so far '}${s.exact ? '' : '≥ '}${bytesText(s.peak)}` : '');
  write(page.capacity, s.setup.capacity && !capacityIsDrawn(s) ? `capacity ${bytesText(s.setup.capacity)}, off the scale` : '');
  page.phases.forEach((chip, code) => { chip.hidden = !(s.seenPhases && s.seenPhases.has(code)); });
  const which = s.seenPhases && s.seenPhases.size ? 'other phases are' : 'phases are';
  write(page.short, s.tooShort ? `${which} too short to shade at this scale` : '');
  if (page.stop && s.done) page.stop.hidden = true;
  if (s.done) write(page.said, '');
  if (page.writtenNotes === s.notes) return;
  page.writtenNotes = s.notes;
  page.notes.replaceChildren(...s.notes.map(note => make('li', '', note)));
}

function describe(s) {
  const values = s.setup.series.map(({name}, i) => {
    const value = s.data[i + 1].findLast(v => v !== null);
    return value === undefined ? '' : `, ${name} ${bytesText(value)}`;
  });
  const peak = s.peak ? `, peak allocated ${s.exact ? '' : 'at least '}${bytesText(s.peak)}` : '';
  const when = s.setup.remark ? `, ${s.setup.remark}` : ` after ${clockText(s.elapsed)}`;
  return `Memory timeline of ${s.setup.title}${when}${values.join('')}${peak}`;
}

function newPlot(s, page) {
  const series = s.setup.series.map(({name, colour}) => ({
    stroke: colour, width: name === 'allocated' ? 2 : 1.25, points: {show: false}, spanGaps: true,
    fill: name === 'allocated' ? transparent(colour, 0.14) : undefined, dash: name === 'rss' ? [2, 3] : undefined,
  }));
  const top = () => capacityIsDrawn(s) ? Math.max(roomyTop(highest(s)), 1.05 * s.setup.capacity) : roomyTop(highest(s));
  const highTo = () => [0, s.top = top()];
  return new uPlot({
    width: Math.max(320, page.plot.clientWidth), height: PLOT_HEIGHT, padding: [8, GUTTER, 0, 0],
    legend: {show: false}, cursor: {show: false}, select: {show: false},
    scales: {x: {time: false, range: () => [0, Math.max(s.done ? 1e-3 : 1, s.elapsed, s.data[0][s.data[0].length - 1] || 0)]}, y: {range: highTo}},
    axes: axes(page.root, s.setup.remark ? {values: (plot, ticks) => ticks.map(() => '')} : {}), series: [{}, ...series],
    hooks: {drawClear: [u => shadePhases(s, u)], draw: [u => drawCapacity(s, u), u => placeLabels(s, u, page), () => writeWords(s, page)]},
  }, s.data, page.plot);
}

function wireStop(page, model, lost) {               // returns what to do when the kernel answers
  if (!page.stop) return () => {};
  let waiting;
  page.stop.onclick = () => {
    if (page.stop.getAttribute('aria-disabled')) return;
    try { model.send({t: 'stop'}); } catch { lost(); return; }
    page.stop.setAttribute('aria-disabled', 'true');   // `disabled` would throw the keyboard's focus away
    write(page.stop, 'Stopping…');
    waiting = setTimeout(() => write(page.said, 'The kernel will see this when the cell ends; to stop now, use ■ (interrupt the kernel).'), 1000);
  };
  return message => {
    clearTimeout(waiting);
    write(page.said, message.error ? `Stop failed: ${message.error}` : '');
  };
}

function render({model, el}) {
  const s = newState(model.get('setup')), page = buildPage(s, el), plot = newPlot(s, page);
  const picture = plot.ctx.canvas;
  picture.setAttribute('role', 'img');
  window.__memlab_live = s;                          // counters for tests
  let frame = 0, describedAt = -Infinity, askedAt = -Infinity;

  const draw = () => {
    frame = 0;
    s.drawn++;
    plot.setData(s.data);
    if (s.done || performance.now() - describedAt >= 1000) {
      describedAt = performance.now();
      picture.setAttribute('aria-label', describe(s));
    }
  };
  const redraw = () => { frame = frame || requestAnimationFrame(draw); };
  const ask = () => {
    if (performance.now() - askedAt < 1000) return;
    askedAt = performance.now();
    model.send({t: 'hello'});
  };
  const setLost = isLost => {
    if (s.done || isLost === s.isLost) return;
    s.isLost = isLost;
    if (page.stop) page.stop.hidden = isLost;
    write(page.said, isLost ? LOST : '');
  };
  const lost = () => setLost(true);                  // until something arrives: the event also tells of a connection that is back
  const answered = wireStop(page, model, lost);
  const onKey = () => { setLost(false); takeKey(s, model.get('key')); redraw(); };
  const onMessage = (message, buffers) => {
    setLost(false);
    if (message.t === 'ack') answered(message);
    if (message.t !== 'a') return;
    if (takeChunk(s, message, buffers)) ask();
    redraw();
  };
  model.on('change:key', onKey);
  model.on('msg:custom', onMessage);
  model.on('comm_live_update', lost);
  const unwatch = watchPage(page.root, () => { plot.redraw(false, true); redraw(); },
    () => { plot.setSize({width: Math.max(320, page.plot.clientWidth), height: PLOT_HEIGHT}); redraw(); });
  onKey();
  return () => {
    model.off('change:key', onKey);
    model.off('msg:custom', onMessage);
    model.off('comm_live_update', lost);
    unwatch();
    cancelAnimationFrame(frame);
    plot.destroy();
  };
}

export default {render};
