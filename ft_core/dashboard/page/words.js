// Numbers, times and names as text.
const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const time = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minute = new Intl.DateTimeFormat("en-GB", { hour: "2-digit", minute: "2-digit" });

export const integer = value => whole.format(value);
export const number = value => {
  if (value === 0 || Number.isInteger(value)) return whole.format(value);
  return value >= 100 ? whole.format(value) : value >= 10 ? value.toFixed(1) : value.toPrecision(2);
};
// Seconds since 1970 as the time of day here.
export const clock = (seconds, short = false) => (short ? minute : time).format(seconds * 1000);
export const duration = seconds => {
  const s = Math.max(0, seconds);
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 120) return `${s.toFixed(0)} s`;
  if (s < 7200) return `${Math.floor(s / 60)} min`;
  if (s < 172800) return `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;
  return `${Math.floor(s / 86400)} days`;
};
export const bytes = value => value < 1e5 ? `${(value / 1e3).toFixed(1)} kB` : value < 1e9 ? `${(value / 1e6).toFixed(1)} MB` : `${(value / 1e9).toFixed(2)} GB`;
export const several = (count, one, many = `${one}s`) => `${integer(count)} ${count === 1 ? one : many}`;
