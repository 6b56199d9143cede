// Numbers as people read them.

const whole = new Intl.NumberFormat("en");

export const count = (number) => whole.format(number);

export function bytes(number) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let step = 0;
  while (number >= 999.5 && step < units.length - 1) {
    number /= 1000;
    step += 1;
  }
  return `${step && number < 10 ? number.toFixed(1) : Math.round(number)} ${units[step]}`;
}

export function seconds(value) {
  if (value < 0.995) return `${Math.round(value * 1000)} ms`;
  if (value < 9.95) return `${value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return `${(value / 3600).toFixed(1)} h`;
}

export const left = (eta) => (eta === null || eta === undefined ? "" : `about ${seconds(Math.max(1, eta))} left`);

/** A share from 0 to 1; three digits where they matter, near 1. */
export function share(value, digits = 1) {
  return `${(value * 100).toFixed(digits)} %`;
}

export function when(unix) {
  const date = new Date(unix * 1000);
  const today = new Date().toDateString() === date.toDateString();
  return today
    ? date.toLocaleTimeString("en", { hour: "2-digit", minute: "2-digit", hour12: false })
    : date.toLocaleDateString("en", { day: "numeric", month: "short", year: "numeric" });
}

export const plural = (number, one, many = `${one}s`) => `${count(number)} ${number === 1 ? one : many}`;
