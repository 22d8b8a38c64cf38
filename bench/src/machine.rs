//! The machine that a run was made on, and how much of it the run had for itself. What cannot be found out is left out.

use std::fmt;
use std::fs;

use serde::Serialize;

/// The machine, as far as it tells.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    /// Operating system and its version.
    pub system: String,
    /// Processors that this process may use.
    pub processors: Option<usize>,
    /// What they are.
    pub processor: Option<String>,
    /// Main memory, in GiB.
    pub memory_gib: Option<f64>,
    /// Processes that wanted to run, on average over the minute before the run: how busy others kept the machine.
    pub load_before: Option<f64>,
    /// The share of the processors' time that the host gave to other machines during the run, in percent.
    pub steal_percent: Option<f64>,
    #[serde(skip)]
    ticks: Option<Ticks>,
}

/// Processor time since the start of the machine.
#[derive(Debug, Clone, Copy)]
struct Ticks {
    all: f64,
    idle: f64,
    stolen: f64,
}

/// The processors at a moment.
pub(crate) struct Cpu(Ticks);

impl Cpu {
    pub(crate) fn look() -> Option<Self> {
        ticks().map(Self)
    }

    /// How much of the processors' time was used since then, by whomever, in percent.
    pub(crate) fn percent_since(self) -> Option<f64> {
        let now = ticks()?;
        let all = now.all - self.0.all;
        (all > 0.0).then(|| 100.0 - 100.0 * (now.idle - self.0.idle) / all)
    }
}

impl Machine {
    /// The machine, before the run.
    pub(crate) fn look() -> Self {
        let version = read("/proc/sys/kernel/osrelease").map(|v| format!(" {}", v.trim())).unwrap_or_default();
        Self {
            system: format!("{}{version} {}", std::env::consts::OS, std::env::consts::ARCH),
            processors: std::thread::available_parallelism().ok().map(usize::from),
            processor: field("/proc/cpuinfo", "model name"),
            memory_gib: kib("/proc/meminfo", "MemTotal").map(|kib| kib / 1_048_576.0),
            load_before: read("/proc/loadavg").and_then(|text| text.split(' ').next()?.parse().ok()),
            steal_percent: None,
            ticks: ticks(),
        }
    }

    /// The same after the run.
    pub(crate) fn finish(self) -> Self {
        let steal_percent = self.ticks.zip(ticks()).and_then(|(before, after)| {
            let all = after.all - before.all;
            (all > 0.0).then(|| 100.0 * (after.stolen - before.stolen) / all)
        });
        Self { steal_percent, ..self }
    }
}

/// A load above this share of the processors before the run, or stolen time above this share, shows in the figures.
const BUSY: f64 = 0.1;

impl Machine {
    /// Whether others were using it before the run or during it.
    pub(crate) fn is_busy(&self) -> bool {
        let processors = self.processors.map_or(1.0, |n| u32::try_from(n).map_or(f64::INFINITY, f64::from));
        self.load_before.is_some_and(|load| load > processors * BUSY)
            || self.steal_percent.is_some_and(|s| s > 100.0 * BUSY)
    }
}

impl fmt::Display for Machine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(processors) = self.processors {
            write!(f, "{processors} processors")?;
            if let Some(processor) = &self.processor {
                write!(f, " ({processor})")?;
            }
            f.write_str(", ")?;
        }
        if let Some(gib) = self.memory_gib {
            write!(f, "{gib:.0} GiB of memory, ")?;
        }
        f.write_str(&self.system)?;
        if let Some(load) = self.load_before {
            write!(f, "; load before the run {load:.1}")?;
        }
        if let Some(steal) = self.steal_percent {
            write!(f, "; {steal:.0} % of the time taken by other machines of the host")?;
        }
        Ok(())
    }
}

/// Memory of this process that is in use now.
pub(crate) fn resident_kib() -> Option<f64> {
    kib("/proc/self/status", "VmRSS")
}

/// The most memory of this process that was ever in use.
pub(crate) fn peak_kib() -> Option<f64> {
    kib("/proc/self/status", "VmHWM")
}

fn read(file: &str) -> Option<String> {
    fs::read_to_string(file).ok()
}

/// The value of the first line `name: value`.
fn field(file: &str, name: &str) -> Option<String> {
    let text = read(file)?;
    let mut lines = text.lines().filter_map(|line| line.split_once(':'));
    lines.find(|(key, _)| key.trim() == name).map(|(_, value)| value.trim().to_owned())
}

fn kib(file: &str, name: &str) -> Option<f64> {
    field(file, name)?.split(' ').next()?.parse().ok()
}

/// The first line of /proc/stat: user, nice, system, idle, iowait, irq, softirq, steal; what follows is counted in user already.
fn ticks() -> Option<Ticks> {
    let text = read("/proc/stat")?;
    let numbers: Vec<f64> =
        text.lines().next()?.split_whitespace().skip(1).take(8).map_while(|n| n.parse().ok()).collect();
    Some(Ticks { all: numbers.iter().sum(), idle: numbers.get(3)? + numbers.get(4)?, stolen: *numbers.get(7)? })
}
