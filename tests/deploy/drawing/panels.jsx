// Draws the panels of window.DATA (see pages.py) with @grafana/ui, transformed and formatted by @grafana/data.
// What Grafana keeps in its core plugins is drawn here: heatmaps, state timelines, and the layout of the bar gauge.
import React, { useEffect, useState } from 'react';
import { createRoot } from 'react-dom/client';
import {
  applyFieldOverrides,
  createTheme,
  FieldConfigOptionsRegistry,
  FieldType,
  formattedValueToString,
  LoadingState,
  standardTransformers,
  standardTransformersRegistry,
  ThemeContext,
  toDataFrame,
  transformDataFrame,
} from '@grafana/data';
import {
  BarGauge,
  BarGaugeDisplayMode,
  BigValue,
  BigValueColorMode,
  BigValueGraphMode,
  GlobalStyles,
  PanelChrome,
  Table,
  TimeSeries,
} from '@grafana/ui';

const DATA = window.DATA;
const THEME = createTheme({ colors: { mode: DATA.mode } });
const COLUMN = DATA.width / 24;
const ROW = 38;
const GAP = 8;
const RANGE = {
  from: { valueOf: () => DATA.from * 1000 },
  to: { valueOf: () => DATA.to * 1000 },
  raw: { from: 'now-1h', to: 'now' },
};

// In Grafana these two registries are filled by the application; here only with what the dashboards use.
standardTransformersRegistry.setInit(() =>
  ['filterFieldsByName', 'organize', 'merge'].map((id) => {
    const transformation = Object.values(standardTransformers).find((each) => each.id === id);
    return { id, name: id, transformation };
  })
);
const property = (id, isCustom = false) => ({
  id: isCustom ? `custom.${id}` : id,
  path: id,
  name: id,
  isCustom,
  process: (value) => value,
  shouldApply: () => true,
});
const OVERRIDABLE = new FieldConfigOptionsRegistry(() => [
  ...['unit', 'decimals', 'min', 'max', 'color', 'mappings', 'thresholds', 'links', 'displayName'].map((id) => property(id)),
  ...['cellOptions', 'drawStyle', 'lineInterpolation', 'lineWidth', 'fillOpacity', 'showPoints', 'spanNulls'].map((id) =>
    property(id, true)
  ),
  ...['scaleDistribution', 'axisSoftMax', 'axisSoftMin', 'axisPlacement', 'width', 'noValue'].map((id) => property(id, true)),
]);

const number = (text) => (text === '+Inf' ? Infinity : text === '-Inf' ? -Infinity : Number(text));

const finite = (text) => (Number.isFinite(number(text)) ? number(text) : null);

function legend(target, labels) {
  if (target.legend) {
    return target.legend.replace(/\{\{\s*(\w+)\s*\}\}/g, (_, name) => labels[name] ?? '');
  }
  const listed = Object.entries(labels).map(([name, value]) => `${name}="${value}"`);
  return listed.length ? `{${listed.join(', ')}}` : 'Value';
}

// As Grafana's Prometheus data source: a frame for each series, or one frame of a query whose format is a table.
function frames(panel) {
  return panel.results.flatMap((target) => {
    if (target.format === 'table') {
      const names = [...new Set(target.result.flatMap((series) => Object.keys(series.metric)))].sort();
      const value = panel.results.length > 1 ? `Value #${target.ref}` : 'Value';
      const fields = [
        { name: 'Time', type: FieldType.time, values: target.result.map((series) => series.value[0] * 1000) },
        ...names.map((name) => ({
          name,
          type: FieldType.string,
          values: target.result.map((series) => series.metric[name] ?? ''),
        })),
        { name: value, type: FieldType.number, values: target.result.map((series) => number(series.value[1])) },
      ];
      return target.result.length ? [toDataFrame({ refId: target.ref, fields })] : [];
    }
    return target.result.map((series) => {
      const points = series.values ?? [series.value];
      return toDataFrame({
        refId: target.ref,
        fields: [
          { name: 'Time', type: FieldType.time, values: points.map((point) => point[0] * 1000) },
          {
            name: 'Value',
            type: FieldType.number,
            labels: series.metric,
            // What Grafana's time series panel does before it draws: NaN and Inf are gaps.
            values: points.map((point) => (panel.type === 'timeseries' ? finite(point[1]) : number(point[1]))),
            config: { displayNameFromDS: legend(target, series.metric) },
          },
        ],
      });
    });
  });
}

const DRAWN = { drawStyle: 'line', lineWidth: 1, fillOpacity: 0, showPoints: 'auto', spanNulls: false };

function configured(panel, data) {
  const defaults = panel.fieldConfig?.defaults ?? {};
  const mode = panel.type === 'timeseries' ? 'palette-classic' : 'thresholds';
  const plain = {
    color: { mode },
    thresholds: { mode: 'absolute', steps: [{ value: -Infinity, color: 'green' }, { value: 80, color: 'red' }] },
    ...defaults,
    custom: panel.type === 'timeseries' ? { ...DRAWN, ...defaults.custom } : { ...defaults.custom },
  };
  const lowest = (thresholds) => ({
    ...thresholds,
    steps: thresholds.steps.map((step) => ({ ...step, value: step.value ?? -Infinity })),
  });
  const overrides = (panel.fieldConfig?.overrides ?? []).map((override) => ({
    ...override,
    properties: override.properties.map((each) =>
      each.id === 'thresholds' ? { ...each, value: lowest(each.value) } : each
    ),
  }));
  return applyFieldOverrides({
    data,
    fieldConfig: { defaults: { ...plain, thresholds: lowest(plain.thresholds) }, overrides },
    fieldConfigRegistry: OVERRIDABLE,
    replaceVariables: (text) => text,
    theme: THEME,
    timeZone: 'utc',
  });
}

function Stat({ panel, data, width, height }) {
  const field = data[0].fields[1];
  const value = field.display(field.values[field.values.length - 1]);
  const mode = panel.options?.colorMode ?? BigValueColorMode.Value;
  return (
    <BigValue
      theme={THEME}
      width={width}
      height={height}
      value={value}
      colorMode={mode}
      graphMode={BigValueGraphMode.None}
    />
  );
}

function Bars({ data, width, height }) {
  const fields = data.map((frame) => frame.fields[1]);
  const finite = fields.map((field) => field.values[0]).filter(Number.isFinite);
  const each = Math.max(18, Math.min(32, height / fields.length - 4));
  const titles = fields.map((field) => field.config.displayNameFromDS);
  const longest = titles.reduce((a, b) => (a.length > b.length ? a : b));
  return (
    <div>
      {fields.slice(0, Math.floor(height / (each + 4))).map((field, number) => (
        <div key={number} style={{ marginBottom: 4 }}>
          <BarGauge
            theme={THEME}
            width={width}
            height={each}
            orientation="horizontal"
            displayMode={BarGaugeDisplayMode.Gradient}
            itemSpacing={4}
            field={{ ...field.config, min: 0, max: Math.max(...finite) }}
            display={field.display}
            value={{ ...field.display(field.values[0]), title: titles[number] }}
            alignmentFactors={{ title: longest, text: '0.000000' }}
            text={{ titleSize: 12, valueSize: 12 }}
            namePlacement="left"
          />
        </div>
      ))}
    </div>
  );
}

// Cells of a classic histogram: what a bucket has more than the one below.
function Heatmap({ panel, width, height }) {
  const bound = (series) => number(series.metric.le);
  const buckets = [...panel.results[0].result].sort((a, b) => bound(a) - bound(b));
  const times = buckets[0].values.map((point) => point[0]);
  const counts = buckets.map((bucket, row) =>
    bucket.values.map((point, at) => Math.max(0, number(point[1]) - (row ? number(buckets[row - 1].values[at][1]) : 0)))
  );
  const most = Math.max(...counts.flat());
  const left = 56;
  const across = (width - left) / times.length;
  const down = (height - 22) / buckets.length;
  const ink = THEME.colors.text.secondary;
  const ticks = times.filter((_, at) => at % Math.ceil(times.length / 6) === 0);
  return (
    <svg width={width} height={height} fontFamily="Inter, sans-serif" fontSize={11}>
      {counts.map((row, up) =>
        row.map((count, at) => (
          <rect
            key={`${up}-${at}`}
            x={left + at * across}
            y={(buckets.length - 1 - up) * down}
            width={across}
            height={down - 1}
            fill={THEME.visualization.getColorByName('orange')}
            opacity={count ? 0.15 + (0.85 * count) / most : 0}
          />
        ))
      )}
      {buckets.map((bucket, up) => (
        <text key={up} x={left - 6} y={(buckets.length - up) * down - down / 2 + 4} textAnchor="end" fill={ink}>
          {up % 2 || buckets.length < 10 ? bucket.metric.le : ''}
        </text>
      ))}
      {ticks.map((time) => (
        <text key={time} x={left + times.indexOf(time) * across} y={height - 6} fill={ink}>
          {new Date(time * 1000).toISOString().slice(11, 19)}
        </text>
      ))}
    </svg>
  );
}

// A row for each series, its bars coloured by `colour(value)`; null draws nothing.
function Timelines({ data, width, height, colour, foot = null }) {
  const left = 170;
  const from = DATA.from * 1000;
  const across = (width - left) / (DATA.to * 1000 - from);
  const down = (height - 40) / data.length;
  const ink = THEME.colors.text.secondary;
  const at = (time) => left + (time - from) * across;
  return (
    <svg width={width} height={height} fontFamily="Inter, sans-serif" fontSize={11}>
      {data.map((frame, row) => {
        const [time, field] = frame.fields;
        const step = time.values.length > 1 ? time.values[1] - time.values[0] : 1000;
        return (
          <g key={row}>
            <text x={left - 6} y={row * down + down / 2 + 4} textAnchor="end" fill={ink}>
              {field.config.displayNameFromDS}
            </text>
            {field.values.map((value, k) => {
              const fill = Number.isFinite(value) ? colour(value, field) : null;
              return fill ? (
                <rect
                  key={k}
                  x={at(time.values[k])}
                  y={row * down + down * 0.1}
                  width={Math.min(step, time.values[k + 1] - time.values[k] || step) * across + 0.5}
                  height={down * 0.8}
                  fill={fill}
                />
              ) : null;
            })}
          </g>
        );
      })}
      {[0, 1, 2, 3, 4].map((tick) => {
        const time = from + ((DATA.to * 1000 - from) * tick) / 5;
        return (
          <text key={tick} x={at(time)} y={height - 24} fill={ink}>
            {new Date(time).toISOString().slice(11, 19)}
          </text>
        );
      })}
      {foot ? (
        <text x={left} y={height - 6} fill={ink}>
          {foot}
        </text>
      ) : null}
    </svg>
  );
}

const TURBO = ['#30123b', '#4662d7', '#36aaf9', '#1ae4b6', '#72fe5e', '#c7ef34', '#faba39', '#f66b19', '#ca2a04', '#7a0403'];

function Spans({ panel, data, ...size }) {
  const texts = panel.fieldConfig.defaults.mappings[0].options;
  const shown = (value) => texts[String(value)].color;
  return (
    <Timelines
      {...size}
      data={data}
      colour={(value) => (shown(value) === 'transparent' ? null : THEME.visualization.getColorByName(shown(value)))}
      foot={Object.values(texts)
        .filter((each) => each.color !== 'transparent')
        .map((each) => `${each.color}: ${each.text}`)
        .join(' · ')}
    />
  );
}

function RowHeat({ data, ...size }) {
  const values = data.flatMap((frame) => frame.fields[1].values).filter(Number.isFinite);
  const [least, most] = [Math.min(...values), Math.max(...values)];
  const colour = (value) => TURBO[Math.round(((value - least) / (most - least || 1)) * (TURBO.length - 1))];
  return <Timelines {...size} data={data} colour={colour} foot={`${least.toFixed(2)} (dark blue) to ${most.toFixed(2)} (red)`} />;
}

function Rows({ panel, data, width, height }) {
  const [shown, show] = useState(null);
  useEffect(() => {
    const done = transformDataFrame(panel.transformations ?? [], data).subscribe((found) =>
      show(configured(panel, found))
    );
    return () => done.unsubscribe();
  }, []);
  if (!shown) {
    return <div />;
  }
  return (
    <Table
      data={shown[0]}
      width={width}
      height={height}
      timeRange={RANGE}
      columnMinWidth={panel.fieldConfig?.defaults?.custom?.minWidth}
      enableSharedCrosshair={false}
      initialSortBy={panel.options?.sortBy}
    />
  );
}

function Lines({ panel, data, width, height }) {
  const placed = { displayMode: 'list', placement: 'bottom', showLegend: true, calcs: [], ...panel.options?.legend };
  return (
    <TimeSeries frames={data} timeRange={RANGE} timeZone="utc" width={width} height={height} legend={placed} options={{}}>
      {() => null}
    </TimeSeries>
  );
}

function Inside({ panel, width, height }) {
  const found = frames(panel);
  if (!found.length) {
    const said = panel.fieldConfig?.defaults?.noValue;
    return <div style={{ color: said ? THEME.colors.text.secondary : 'red' }}>{said ?? 'No data'}</div>;
  }
  const size = { panel, width, height };
  if (panel.type === 'table') {
    return <Rows {...size} data={found} />;
  }
  if (panel.type === 'heatmap') {
    return panel.results[0].format === 'heatmap' ? <Heatmap {...size} /> : <RowHeat {...size} data={found} />;
  }
  if (panel.type === 'state-timeline') {
    return <Spans {...size} data={found} />;
  }
  const data = configured(panel, found);
  return panel.type === 'stat' ? (
    <Stat {...size} data={data} />
  ) : panel.type === 'bargauge' ? (
    <Bars {...size} data={data} />
  ) : (
    <Lines {...size} data={data} />
  );
}

class Guard extends React.Component {
  state = {};
  static getDerivedStateFromError(error) {
    return { error };
  }
  render() {
    return this.state.error ? <pre style={{ color: 'red' }}>{String(this.state.error.stack)}</pre> : this.props.children;
  }
}

function Panel({ panel }) {
  const { x, y, w, h } = panel.gridPos;
  const place = { position: 'absolute', left: x * COLUMN, top: y * ROW, width: w * COLUMN - GAP, height: h * ROW - GAP };
  if (panel.type === 'row') {
    return <h4 style={{ ...place, color: THEME.colors.text.primary, margin: 0 }}>{panel.title}</h4>;
  }
  return (
    <div style={place}>
      <PanelChrome
        title={panel.title}
        description={panel.description}
        width={place.width}
        height={place.height}
        loadingState={LoadingState.Done}
      >
        {(width, height) => (
          <Guard>
            <Inside panel={panel} width={width} height={height} />
          </Guard>
        )}
      </PanelChrome>
    </div>
  );
}

createRoot(document.getElementById('root')).render(
  <ThemeContext.Provider value={THEME}>
    <GlobalStyles />
    <div style={{ position: 'relative' }}>
      {DATA.panels.map((panel, number) => (
        <Panel key={number} panel={panel} />
      ))}
    </div>
  </ThemeContext.Provider>
);
