const COLORS = ["#5b6b8c", "#8a94a8", "#8f7aa8", "#a89a8c", "#c08f6b", "#8fae72", "#d08770", "#45a29e", "#d9a93e", "#4f83c4", "#86b5dd", "#b07cc6", "#c9737f", "#9aa7b8"];
const canvas = document.querySelector("canvas"), bands = document.getElementById("bands"), under = document.getElementById("under");
const numPoints = DATA.ops.length, numKinds = DATA.kinds.length;
const totals = DATA.ops.map((_, p) => DATA.bytes.reduce((sum, row) => sum + row[p], 0));
const top_ = Math.max(totals[DATA.peak_point], DATA.budget || 0) * 1.1;
const LEFT = 56;
let chosen = null;

function units(n) {
  for (const [unit, size] of [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (n >= size) return (n / size).toFixed(2) + " " + unit;
  }
  return n + " B";
}

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name); }

function draw() {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  canvas.width = width * scale; canvas.height = height * scale;
  const g = canvas.getContext("2d");
  g.scale(scale, scale);
  g.font = "12px system-ui";
  const x = p => LEFT + (width - LEFT) * p / numPoints, y = n => height * (1 - n / top_);
  const below = new Array(numPoints).fill(0);
  for (let k = 0; k < numKinds; k++) {
    g.fillStyle = COLORS[k % COLORS.length];
    g.beginPath();
    for (let p = 0; p < numPoints; p++) { g.lineTo(x(p), y(below[p] + DATA.bytes[k][p])); g.lineTo(x(p + 1), y(below[p] + DATA.bytes[k][p])); }
    for (let p = numPoints - 1; p >= 0; p--) { g.lineTo(x(p + 1), y(below[p])); g.lineTo(x(p), y(below[p])); }
    g.fill();
    for (let p = 0; p < numPoints; p++) below[p] += DATA.bytes[k][p];
  }
  g.fillStyle = g.strokeStyle = css("--ink");
  for (let i = 0; i < 4; i++) g.fillText(units(Math.round(top_ * i / 4)), 0, Math.min(y(top_ * i / 4), height - 3));
  const peak = DATA.peak_point, label = "peak " + units(totals[peak]), wide = g.measureText(label).width;
  g.fillText(label, Math.min(Math.max(x(peak + .5) - wide / 2, LEFT), width - wide), y(totals[peak]) - 5);
  if (DATA.budget) {
    g.strokeStyle = css("--over"); g.setLineDash([5, 3]);
    g.beginPath(); g.moveTo(LEFT, y(DATA.budget)); g.lineTo(width, y(DATA.budget)); g.stroke(); g.setLineDash([]);
    g.fillStyle = css("--over"); g.fillText("budget", LEFT + 4, y(DATA.budget) - 4);
  }
  if (chosen !== null) {
    g.strokeStyle = css("--ink");
    g.beginPath(); g.moveTo(x(chosen + .5), 0); g.lineTo(x(chosen + .5), height); g.stroke();
  }
  bands.replaceChildren(...DATA.phases.map(([name, start], i) => {
    const end = i + 1 < DATA.phases.length ? DATA.phases[i + 1][1] : numPoints, span = document.createElement("span");
    span.textContent = span.title = name;
    span.style.left = x(start) + "px"; span.style.width = Math.max(x(end) - x(start), 2) + "px";
    return span;
  }));
}

function tell(p) {
  chosen = p;
  const phase = DATA.phases.filter(([, start]) => start <= p).pop()[0];
  const parts = DATA.kinds.map((name, k) => [name, DATA.bytes[k][p], COLORS[k % COLORS.length]]).filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
  under.replaceChildren(`${phase}${DATA.layers[p] ? ", " + DATA.layers[p] : ""}, ${DATA.ops[p]}: ${units(totals[p])}`);
  for (const [name, n, color] of parts) {
    const box = document.createElement("i"), part = document.createElement("span");
    box.style.background = color;
    part.append(box, `${name} ${units(n)}`);
    under.append(part, " ");
  }
  draw();
}

canvas.addEventListener("pointermove", event => {
  const at = (event.offsetX - LEFT) / (canvas.clientWidth - LEFT);
  tell(Math.min(Math.max(Math.floor(at * numPoints), 0), numPoints - 1));
});
window.addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
tell(DATA.peak_point);

if (DATA.speed) {
  const price = document.getElementById("price"), tokens = document.getElementById("tokens");
  const show = () => {
    const hours = tokens.value * 1e6 / DATA.speed.tokensPerS / 3600;
    document.getElementById("cost").textContent = `= ${hours.toFixed(1)} h, ${(hours * DATA.speed.devices * price.value).toFixed(2)} per epoch`;
  };
  price.addEventListener("input", show); tokens.addEventListener("input", show); show();
}
