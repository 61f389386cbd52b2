// Zooms all charts over time together, draws the blocks of windows that have few, and hides policies by the legend.
const MAX_SHOWN = 1800;  // blocks of a window: browsers draw more of them slowly
const LABELLED = 0.006;  // fraction of the window: shorter blocks get no number
const US = 1e6;
const figures = [...document.querySelectorAll('.chart .js-plotly-plot')];
const overTime = [...document.querySelectorAll('.chart.time .js-plotly-plot')];

// The grid of charts has its widths only now. Programs that read the page wait for `body[data-drawn]`.
Promise.allSettled(figures.map(figure => Plotly.Plots.resize(figure))).then(() => { document.body.dataset.drawn = ''; });

const seconds = us => (us / US).toFixed(3);

function describe([, start, end, request, first, last, members, exchange], {exchanges}) {
    const when = `${seconds(start)} to ${seconds(end)} s`;
    if (request < 0) return `${last} decodes<br>${when}`;
    const tokens = `tokens ${first.toLocaleString('en')} to ${last.toLocaleString('en')}`;
    return `request ${request}<br>${tokens}<br>${members} instances, ${exchanges[exchange]}<br>${when}`;
}

function describeTransfer([, start, end, request, blocks, sources, targets]) {
    return `KV of request ${request}<br>${blocks.toLocaleString('en')} blocks, instances ${sources.join(', ')} to ` +
        `${targets.join(', ')}<br>${seconds(start)} to ${seconds(end)} s`;
}

function bars(shown, {names, colours}, describeOne, text, outline) {
    return {
        y: [shown.map(([row]) => names[row])],
        base: [shown.map(([, start]) => start / US)],
        x: [shown.map(([, start, end]) => (end - start) / US)],
        text: [shown.map(text)],
        hovertext: [shown.map(describeOne)],
        'marker.color': [shown.map(([, , , request]) =>
            request < 0 ? colours[colours.length - 1] : colours[request % (colours.length - 1)])],
        'marker.line.width': [shown.map(([, , , request]) => request < 0 ? 0 : 0.5)],
        'marker.line.color': [outline],
    };
}

function drawBlocks(figure) {
    const data = figure.blocks;
    const [left, right] = figure._fullLayout.xaxis.range.map(at => at * US);
    const rows = figure._fullLayout.yaxis.range.map(Number).sort((a, b) => a - b);
    const inWindow = ([row, start, end]) => end > left && start < right && row > rows[0] - 1 && row < rows[1] + 1;
    const shown = data.blocks.filter(inWindow);
    const isDetailed = shown.length <= MAX_SHOWN && (data.until === null || right <= data.until);
    const wide = LABELLED * (right - left);
    const steps = isDetailed ? shown : [];
    const label = ([, start, end, request]) => request < 0 || end - start <= wide ? '' : String(request);
    const transfers = isDetailed ? data.transfers.filter(inWindow) : [];
    Plotly.restyle(figure, bars(steps, data, block => describe(block, data), label, 'white'), [1]);
    Plotly.restyle(figure, bars(transfers, data, describeTransfer, () => '', '#222222'), [2]);
    Plotly.restyle(figure, {visible: !isDetailed}, [0]);
}

let isZooming = false;
function zoomAll(zoomed) {
    if (isZooming) return;
    isZooming = true;
    const range = [...zoomed._fullLayout.xaxis.range];
    const others = overTime.filter(figure => figure !== zoomed);
    Promise.all(others.map(figure => Plotly.relayout(figure, {'xaxis.range': range}))).then(() => {
        isZooming = false;
        overTime.filter(figure => figure.blocks).forEach(drawBlocks);
    });
}

for (const figure of overTime) {
    const data = document.getElementById(`${figure.id}-blocks`);
    if (data) {
        figure.blocks = JSON.parse(data.textContent);
        drawBlocks(figure);
    }
    figure.on('plotly_relayout', change => {
        if (Object.keys(change).some(key => /^[xy]axis\./.test(key))) zoomAll(figure);
    });
}

for (const button of document.querySelectorAll('.legend button')) {
    button.addEventListener('click', () => {
        const isOff = button.classList.toggle('off');
        for (const figure of figures) {
            const own = figure.data.flatMap((trace, place) => trace.meta === button.dataset.policy ? [place] : []);
            if (own.length) Plotly.restyle(figure, {visible: !isOff}, own);
        }
    });
}
