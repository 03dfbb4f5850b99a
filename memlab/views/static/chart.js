// What the live view and the explorer share: words for numbers, colours of the page, elements without markup.
// Text from the kernel only ever becomes textContent.

const memlabChart = (() => {
  const UNITS = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  const FONT_PX = 11;

  function unitOf(size) {
    return size < 1 ? 0 : Math.min(UNITS.length - 1, Math.floor(Math.log2(size) / 10));
  }

  function bytesText(count) {                       // as memlab.units.format_bytes
    const unit = unitOf(Math.abs(count)), value = count / 1024 ** unit;
    if (unit === 0) return `${Math.round(count)} B`;
    return `${value.toFixed(Math.abs(value) < 100 ? 2 : 1)} ${UNITS[unit]}`;
  }

  function byteTicks(plot, ticks) {                 // one unit for the whole axis
    const unit = unitOf(Math.max(...ticks)), step = ticks.length > 1 ? (ticks[1] - ticks[0]) / 1024 ** unit : 1;
    const digits = step >= 1 || ticks.length < 2 ? 0 : Math.min(3, Math.ceil(-Math.log2(step)));
    return ticks.map(tick => tick === 0 ? '0' : `${(tick / 1024 ** unit).toFixed(digits)} ${UNITS[unit]}`);
  }

  function clockText(seconds) {
    const whole = Math.floor(seconds), two = number => String(number).padStart(2, '0');
    if (whole < 60) return `${seconds.toFixed(1)} s`;
    const minutes = Math.floor(whole / 60) % 60, hours = Math.floor(whole / 3600);
    return hours ? `${hours}:${two(minutes)}:${two(whole % 60)}` : `${minutes}:${two(whole % 60)} min`;
  }

  function timeTicks(plot, ticks) {
    const step = ticks.length > 1 ? ticks[1] - ticks[0] : 1, last = ticks[ticks.length - 1];
    if (step >= 1 && last >= 60) return ticks.map(tick => tick === 0 ? '0' : clockText(tick + 1e-6).replace(' min', ''));
    const milli = last < 1, scale = milli ? 1000 : 1, digits = Math.max(0, Math.ceil(-Math.log10(step * scale) - 1e-9));
    return ticks.map(tick => tick === 0 ? '0' : `${(tick * scale).toFixed(digits)} ${milli ? 'ms' : 's'}`);
  }

  function roomyTop(value) {                        // steps of an eighth to a quarter, so that the axis does not tremble
    if (!(value > 0)) return 1024;
    const step = 2 ** (Math.floor(Math.log2(value)) - 2);
    return Math.ceil(value * 1.04 / step) * step;
  }

  const BINARY_STEPS = Array.from({length: 50}, (_, power) => 2 ** power);

  const TIME_STEPS = [...Array.from({length: 9}, (_, i) => 10 ** (i - 9)).flatMap(ten => [ten, 2 * ten, 5 * ten]),
    1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 864000];

  function ink(element, alpha) {                    // the page's text colour, as JupyterLab's theme has it now
    const numbers = getComputedStyle(element).color.match(/[\d.]+/g) || [117, 121, 130];
    return `rgba(${numbers.slice(0, 3).join(', ')}, ${alpha})`;
  }

  function axes(element, times = {}) {              // `times`: what differs where seconds mean nothing
    const common = {                                // the element may not be on the page yet: its own style says nothing
      font: `${FONT_PX}px ${getComputedStyle(document.body).getPropertyValue('--jp-ui-font-family') || 'system-ui, sans-serif'}`, labelGap: 0, gap: 6,
      stroke: () => ink(element, 0.62), ticks: {show: false},
    };
    return [
      {...common, size: 24, space: 90, values: timeTicks, incrs: TIME_STEPS, grid: {show: false}, ...times},
      {...common, size: 70, space: 34, values: byteTicks, incrs: BINARY_STEPS,
       grid: {show: true, width: 1, stroke: () => ink(element, 0.10)}},
    ];
  }

  function make(tag, className, text, parent) {
    const element = document.createElement(tag);
    if (className) element.className = className;
    if (text !== undefined) element.textContent = text;
    if (parent) parent.append(element);
    return element;
  }

  function makeRoot(className, parent) {            // JupyterLab would take Enter, arrows and digits for its own
    const root = make('div', `memlab ${className}`, undefined, parent);
    root.setAttribute('data-lm-suppress-shortcuts', 'true');
    return root;
  }

  function write(element, text) {                   // touches the page only where something changed
    if (element.textContent !== text) element.textContent = text;
  }

  function transparent(colour, alpha) {
    const channel = at => parseInt(colour.slice(at, at + 2), 16);
    return `rgba(${channel(1)}, ${channel(3)}, ${channel(5)}, ${alpha})`;
  }

  function own(view) {                              // a copy that begins at 0, so that f8 and f4 views are aligned
    return view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength);
  }

  function watchPage(element, redraw, resize) {     // theme and width; returns how to stop watching
    const themes = new MutationObserver(redraw), sizes = new ResizeObserver(resize);
    themes.observe(document.body, {attributes: true, attributeFilter: ['data-jp-theme-light', 'data-jp-theme-name', 'class']});
    sizes.observe(element);
    return () => { themes.disconnect(); sizes.disconnect(); };
  }

  return {bytesText, byteTicks, clockText, timeTicks, roomyTop, ink, axes, make, makeRoot, write, transparent, own, watchPage};
})();
