"""The page of ``AttentionMaps``: one HTML file that contains its script and its data."""

PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$TITLE</title>
<style>
  body { font: 14px/1.4 system-ui, sans-serif; margin: 1.5rem; color: #1c2733; background: #fff; }
  h1 { font-size: 1.1rem; font-weight: 600; margin: 0 0 .2rem; }
  p { margin: 0 0 1rem; color: #55606c; }
  main { display: flex; flex-wrap: wrap; gap: 2rem; align-items: flex-start; }
  table { border-collapse: collapse; }
  th { font-size: .7rem; font-weight: 500; color: #55606c; padding: 2px 4px; text-align: right; }
  thead th { text-align: center; }
  td { padding: 2px; }
  canvas { image-rendering: pixelated; display: block; }
  td canvas { width: 56px; height: 56px; border: 1px solid #d5dbe1; cursor: pointer; }
  td canvas.chosen { outline: 2px solid #d9480f; }
  td canvas:focus-visible { outline: 2px solid #1864ab; }
  #large { position: sticky; top: 1rem; }
  #large svg { font: 10px ui-monospace, monospace; fill: #1c2733; }
  #said { min-height: 1.5em; font-size: .85rem; }
</style>
</head>
<body>
<h1>$TITLE</h1>
<p>A row is the token that attends, a column the token attended to. Each map goes from white (0) to its largest weight.
Click a map to enlarge it.</p>
<main>
  <table id="maps"><thead></thead><tbody></tbody></table>
  <section id="large"><div id="name"></div><svg></svg><div id="said"></div></section>
</main>
<script>
const data = $DATA;
const size = data.tokens.length, area = size * size;
const bytes = Uint8Array.from(atob(data.weights), character => character.charCodeAt(0));
const mapOf = (row, column) => bytes.subarray((row * data.heads.length + column) * area,
                                              (row * data.heads.length + column + 1) * area);
const blue = value => [255 - value * 0.97, 255 - value * 0.71, 255 - value * 0.42].map(Math.round);
const element = (name, text = "") => Object.assign(document.createElement(name), {textContent: text});

function draw(canvas, map) {
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d"), image = context.createImageData(size, size);
  map.forEach((value, index) => image.data.set([...blue(value), 255], 4 * index));
  context.putImageData(image, 0, 0);
}

function enlarge(row, column, canvas) {
  document.querySelectorAll("canvas.chosen").forEach(other => other.classList.remove("chosen"));
  canvas.classList.add("chosen");
  const name = `layer ${data.layers[row]}, head ${data.heads[column]}`, largest = data.largest[row][column];
  document.getElementById("name").textContent = `${name}: largest weight ${largest.toFixed(3)}`;
  const map = mapOf(row, column), svg = document.querySelector("#large svg");
  const cell = Math.max(5, Math.min(18, Math.floor(640 / size)));
  const margin = cell < 9 ? 4 : 8 + 6.2 * Math.max(...data.tokens.map(token => token.length));
  svg.replaceChildren();
  svg.setAttribute("width", margin + size * cell + 2);
  svg.setAttribute("height", margin + size * cell + 2);
  const add = (kind, attributes, text) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    if (text !== undefined) node.textContent = text;
    svg.append(node);
    return node;
  };
  if (cell >= 9) data.tokens.forEach((token, index) => {
    const middle = margin + (index + 0.5) * cell;
    add("text", {x: margin - 4, y: middle + 3, "text-anchor": "end"}, token);
    add("text", {x: 0, y: 0, transform: `translate(${middle + 3} ${margin - 4}) rotate(-90)`}, token);
  });
  map.forEach((value, index) => {
    const from = Math.floor(index / size), to = index % size;
    const square = add("rect", {x: margin + to * cell, y: margin + from * cell, width: cell, height: cell,
                                fill: `rgb(${blue(value)})`});
    square.addEventListener("mouseenter", () => document.getElementById("said").textContent =
      `${data.tokens[from]} \\u2192 ${data.tokens[to]}: ${(value / 255 * largest).toFixed(3)}`);
  });
  add("rect", {x: margin, y: margin, width: size * cell, height: size * cell, fill: "none", stroke: "#d5dbe1"});
}

const head = document.querySelector("#maps thead").insertRow();
head.append(element("th"), ...data.heads.map(number => element("th", `head ${number}`)));
data.layers.forEach((layer, row) => {
  const line = document.querySelector("#maps tbody").insertRow();
  line.append(element("th", `layer ${layer}`));
  data.heads.forEach((number, column) => {
    const canvas = element("canvas");
    canvas.tabIndex = 0;
    canvas.title = `layer ${layer}, head ${number}`;
    draw(canvas, mapOf(row, column));
    canvas.addEventListener("click", () => enlarge(row, column, canvas));
    canvas.addEventListener("keydown", event => event.key === "Enter" && enlarge(row, column, canvas));
    line.insertCell().append(canvas);
  });
});
document.querySelector("#maps canvas").click();
</script>
</body>
</html>
"""
