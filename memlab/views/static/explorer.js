// The explorer: what is seen is asked of the kernel; until it answers, the detail that is there is stretched.

const {TIME_STEPS, bytesText, roomyTop, axes, make, makeRoot, write, transparent, own, watchPage} = memlabChart;
const PLOT_HEIGHT = 280, RIGHT = 24, SMALLEST_PART = 1e-9, PATIENCE_MS = 1000;

function readSeries(heads, view) {                   // [{name, colour, times, lows, highs}]
  const raw = own(view);
  let offset = 0;
  return heads.map(({name, colour, n}) => {
    const times = new Float64Array(raw, offset, n), lows = new Float32Array(raw, offset + 8 * n, n);
    const highs = new Float32Array(raw, offset + 12 * n, n);
    offset += 16 * n;
    return {name, colour, times, lows, highs};
  });
}

function timeText(seconds, width, setup) {           // as many digits as the part that is seen tells apart
  const scale = setup.has_times ? 1 : 100 / setup.span;    // without times in percent of the run
  const digits = Math.min(9, Math.max(1, Math.ceil(3 - Math.log10(scale * width))));
  return `${(scale * seconds).toFixed(digits)} ${setup.has_times ? 's' : '%'}`;
}

function percentTicks(span) {
  const values = (plot, ticks) => ticks.map(tick => `${+(100 * tick / span).toPrecision(6)} %`);
  return {values, incrs: TIME_STEPS.map(step => step * span / 100)};
}

function stretchAt(times, at) {                      // the last stretch that begins at or before `at`
  let low = 0, high = times.length - 1, found = -1;
  while (low <= high) {
    const middle = (low + high) >> 1;
    if (times[middle] <= at) { found = middle; low = middle + 1; } else high = middle - 1;
  }
  return found;
}

function drawSeries(u, series, seen) {               // memory keeps its value until the next event: steps, and a band where bins hold many
  const {ctx: g, bbox} = u, ratio = devicePixelRatio, x = t => u.valToPos(t, 'x', true), y = v => u.valToPos(v, 'y', true);
  g.save();
  g.beginPath(); g.rect(bbox.left, bbox.top, bbox.width, bbox.height); g.clip();
  for (const {colour, times, lows, highs, name} of series) {
    if (!times.length) continue;
    const right = i => x(i + 1 < times.length ? times[i + 1] : Math.max(seen[1], times[i]));
    g.fillStyle = transparent(colour, 0.32);
    g.strokeStyle = colour;
    g.lineWidth = (name === 'allocated' ? 1.75 : 1.25) * ratio;
    g.lineJoin = 'round';
    const line = new Path2D();
    for (let i = 0; i < times.length; i++) {
      const from = x(times[i]), to = right(i), high = y(highs[i]), low = y(lows[i]);
      if (low - high > 1) g.fillRect(from, high, Math.max(1, to - from), low - high);
      if (i === 0) line.moveTo(from, high); else line.lineTo(from, high);
      line.lineTo(to, high);
    }
    g.stroke(line);
  }
  g.restore();
}

function buildPage(setup, el) {
  const root = makeRoot('memlab-explorer', el), head = make('div', 'memlab-head', undefined, root);
  const page = {root};
  make('span', 'memlab-title', setup.title, head);
  page.part = make('span', 'memlab-number memlab-quiet', '', head);
  const buttons = make('span', 'memlab-buttons', undefined, head);
  const button = (text, name) => {
    const element = make('button', 'memlab-button', text, buttons);
    element.title = name;
    element.setAttribute('aria-label', name);
    return element;
  };
  page.left = button('‹', 'Earlier'); page.right = button('›', 'Later');
  page.wider = button('−', 'Zoom out'); page.closer = button('+', 'Zoom in');
  page.whole = button('Whole run', 'Show the whole run'); page.close = button('Close', 'Close the explorer');
  page.said = make('div', 'memlab-said', '', root);
  page.said.setAttribute('role', 'status');
  page.plot = make('div', 'memlab-plot', undefined, root);
  page.plot.tabIndex = 0;
  page.plot.setAttribute('aria-label', 'Timeline. Arrow keys move, plus and minus zoom, 0 shows the whole run.');
  page.plot.setAttribute('role', 'group');
  page.readout = make('div', 'memlab-readout', undefined, root);
  page.at = make('span', 'memlab-number memlab-quiet', '', page.readout);
  page.values = new Map();
  return page;
}

function writeReadout(page, series, at, width, setup) {
  write(page.at, at === null ? 'drag to zoom · shift-drag to move · double-click for the whole run' : timeText(at, width, setup));
  for (const {name, colour, times, lows, highs} of series) {
    if (!page.values.has(name)) {
      const item = make('span', '', undefined, page.readout);
      make('span', '', `${name} `, item).style.color = colour;
      page.values.set(name, make('span', 'memlab-number', '', item));
    }
    const i = at === null ? -1 : stretchAt(times, at), low = lows[i], high = highs[i];
    write(page.values.get(name), i < 0 ? '' : low === high ? bytesText(high) : `${bytesText(low)} to ${bytesText(high)}`);
  }
}

function wireMoves(page, plot, setup, seen, show) {  // every way to move the view; `show(begin, end)` does it
  const zoom = factor => {
    const middle = (seen[0] + seen[1]) / 2, half = (seen[1] - seen[0]) * factor / 2;
    show(middle - half, middle + half);
  };
  const move = share => {
    const width = seen[1] - seen[0], begin = Math.min(Math.max(0, seen[0] + share * width), setup.span - width);
    show(begin, begin + width);
  };
  const whole = () => show(0, setup.span);
  page.left.onclick = () => move(-0.4); page.right.onclick = () => move(0.4);
  page.closer.onclick = () => zoom(0.5); page.wider.onclick = () => zoom(2);
  page.whole.onclick = whole;
  const keys = {ArrowLeft: () => move(-0.2), ArrowRight: () => move(0.2), '+': () => zoom(0.5), '=': () => zoom(0.5), '-': () => zoom(2), 0: whole};
  page.plot.addEventListener('keydown', event => {
    if (!keys[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault(); event.stopPropagation();
    keys[event.key]();
  });
  plot.over.addEventListener('dblclick', event => { event.stopPropagation(); whole(); });
  plot.over.addEventListener('mousedown', event => {          // shift-drag moves; uPlot must not see it as a selection
    if (!event.shiftKey) return;
    event.preventDefault(); event.stopImmediatePropagation();
    const from = event.clientX, begin = seen[0], width = seen[1] - seen[0], pixels = plot.over.clientWidth;
    const drag = e => {
      const at = Math.min(Math.max(0, begin - (e.clientX - from) / pixels * width), setup.span - width);
      show(at, at + width);
    };
    const end = () => { window.removeEventListener('mousemove', drag); window.removeEventListener('mouseup', end); };
    window.addEventListener('mousemove', drag); window.addEventListener('mouseup', end);
  }, true);
}

function render({model, el}) {
  const setup = model.get('setup'), page = buildPage(setup, el), seen = [0, setup.span];
  const counters = window.__memlab_explorer = {asked: 0, answered: 0, stale: 0, answeredAll: false, lastMs: 0, seen};
  const askedAt = new Map();
  let series = readSeries(setup.series, model.get('overview')), id = 0, timer = 0, pending = 0, at = null;

  const plot = new uPlot({
    width: Math.max(320, page.plot.clientWidth), height: PLOT_HEIGHT, padding: [8, RIGHT, 0, 0], legend: {show: false},
    cursor: {y: false, points: {show: false}, drag: {x: true, y: false, setScale: false}, bind: {dblclick: () => null}},
    scales: {x: {time: false, range: () => [...seen]}, y: {range: () => [0, roomyTop(top())]}},
    axes: axes(page.root, setup.has_times ? {} : percentTicks(setup.span)), series: [{}, {show: false}],
    hooks: {draw: [u => drawSeries(u, series, seen)], setSelect: [taken], setCursor: [pointed]},
  }, [[0, setup.span], [0, 0]], page.plot);
  plot.ctx.canvas.setAttribute('role', 'img');

  function top() {
    let highest = 0;
    for (const {times, highs} of series)
      for (let i = Math.max(0, stretchAt(times, seen[0])); i < times.length && times[i] <= seen[1]; i++) highest = Math.max(highest, highs[i]);
    return highest;
  }
  function draw() {
    plot.setData(plot.data);
    const [begin, end] = seen.map(at => timeText(at, seen[1] - seen[0], setup));
    write(page.part, `${begin} to ${end}`);
    writeReadout(page, series, at, seen[1] - seen[0], setup);
    plot.ctx.canvas.setAttribute('aria-label', `Memory timeline of ${setup.title}, ${page.part.textContent}` +
      series.map(({name, highs}) => highs.length ? `, ${name} at most ${bytesText(highs.reduce((a, b) => Math.max(a, b)))}` : '').join(''));
  }
  function taken(u) {
    const {left, width} = u.select;
    if (width < 3) return;
    u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
    show(u.posToVal(left, 'x'), u.posToVal(left + width, 'x'));
  }
  function pointed(u) {
    at = u.cursor.left >= 0 && u.cursor.left !== null ? u.posToVal(u.cursor.left, 'x') : null;
    writeReadout(page, series, at, seen[1] - seen[0], setup);
  }
  function show(begin, end) {
    begin = Math.max(0, begin); end = Math.min(setup.span, end);
    if (!(end - begin > SMALLEST_PART)) return;
    seen[0] = begin; seen[1] = end;
    draw();
    pending = pending || requestAnimationFrame(ask);           // a drag asks once per frame, not once per event
  }
  function ask() {
    pending = 0;
    counters.asked++;
    counters.answeredAll = false;
    askedAt.set(++id, performance.now());
    model.send({t: 'window', id, begin: seen[0], end: seen[1], bins: Math.max(100, Math.round(plot.bbox.width / devicePixelRatio))});
    clearTimeout(timer);
    timer = setTimeout(() => write(page.said, 'The kernel is busy; the detail comes when it can answer.'), PATIENCE_MS);
  }
  function sayError() { write(page.said, model.get('error') ? `No detail: ${model.get('error')}` : ''); }
  function onMessage(message, buffers) {
    if (message.t === 'show') show(message.begin, message.end);
    if (message.t !== 'window') return;
    if (message.id !== id) { counters.stale++; return; }
    clearTimeout(timer);
    counters.answered++;
    counters.answeredAll = !pending;
    counters.lastMs = performance.now() - askedAt.get(id);
    askedAt.clear();
    write(page.said, message.error ? `No detail: ${message.error}` : '');
    if (message.error) return;
    series = readSeries(message.series, buffers[0]);
    draw();
  }

  page.close.onclick = () => { for (const b of page.root.querySelectorAll('button')) b.disabled = true; model.send({t: 'close'}); };
  wireMoves(page, plot, setup, seen, show);
  model.on('msg:custom', onMessage);
  model.on('change:error', sayError);
  const unwatch = watchPage(page.root, () => plot.redraw(false, true),
    () => { plot.setSize({width: Math.max(320, page.plot.clientWidth), height: PLOT_HEIGHT}); draw(); });
  sayError();
  draw();
  show(...seen);
  return () => {
    model.off('msg:custom', onMessage);
    model.off('change:error', sayError);
    clearTimeout(timer);
    cancelAnimationFrame(pending);
    unwatch();
    plot.destroy();
  };
}

export default {render};
