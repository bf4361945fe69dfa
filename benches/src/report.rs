//! The rows of a bench, the table that it prints, and `target/bench/NAME.json`.

use anyhow::{Context, Result};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Which values are better.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// Lower values, for times.
    Lower,
    /// Higher values, for rates.
    Higher,
}

/// One comparison of Ginnel with an alternative (the peer).
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// The name of the measurement.
    pub case: String,
    /// The unit of both values.
    pub unit: &'static str,
    /// Which values are better.
    pub better: Better,
    /// Ginnel's median.
    pub ginnel: f64,
    /// Name of the alternative.
    pub peer: String,
    /// The alternative's median.
    pub peer_value: f64,
    /// How many times better Ginnel is than the peer; above 1, Ginnel wins.
    pub ratio: f64,
    /// The target for the ratio, if there is one.
    pub target: Option<f64>,
    /// The spread and the circumstances.
    pub note: String,
}

impl Row {
    /// Returns whether the target is reached; `true` if there is no target.
    pub fn reached(&self) -> bool {
        self.target.is_none_or(|target| self.ratio >= target)
    }
}

/// The peer of rows about VMs that say what a VM costs: the same programs as processes of the host, which share memory in the
/// same way.
pub const ON_HOST: &str = "the same on the host";

/// The ratio that rows with that peer should reach. They make sense only under KVM: an emulated guest is several times slower.
pub const BESIDE_HOST: Option<f64> = Some(0.9);

/// The rows of one run.
#[derive(Default)]
pub struct Report {
    rows: Vec<Row>,
    omitted: Vec<String>,
}

/// Returns the median of some figures: the mean of the middle two if their number is even, and NaN if there are none.
pub fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() {
        0 => f64::NAN,
        len if len % 2 == 0 => f64::midpoint(figures[middle - 1], figures[middle]),
        _ => figures[middle],
    }
}

impl Report {
    /// Adds a comparison of paired runs: `ginnel[i]` was measured right beside `peer[i]`. The ratio is the median of the ratios
    /// of the pairs, so that a machine whose speed drifts does not decide it.
    #[expect(clippy::too_many_arguments, reason = "a row has that many columns")]
    pub fn pairs(
        &mut self,
        case: impl Into<String>,
        unit: &'static str,
        better: Better,
        ginnel: &[f64],
        peer: &str,
        peers: &[f64],
        target: Option<f64>,
        note: &str,
    ) {
        let ratio = |(g, p): (&f64, &f64)| if better == Better::Lower { p / g } else { g / p };
        let ratios: Vec<f64> = ginnel.iter().zip(peers).map(ratio).collect();
        let low = ratios.iter().copied().fold(f64::INFINITY, f64::min);
        let high = ratios.iter().copied().fold(0.0, f64::max);
        let spread = if ratios.len() > 1 {
            format!("ratios {low:.2} to {high:.2} in {} pairs", ratios.len())
        } else {
            "one pair".into()
        };
        let row = Row {
            case: case.into(),
            unit,
            better,
            ginnel: median(ginnel.to_vec()),
            peer: peer.into(),
            peer_value: median(peers.to_vec()),
            ratio: median(ratios),
            target,
            note: if note.is_empty() { spread } else { format!("{spread}; {note}") },
        };
        println!("{}", line(&row));
        self.rows.push(row);
    }

    /// Says why a row, or several, cannot be measured here. The others are measured nevertheless, and the table ends with what
    /// is missing.
    pub fn omit(&mut self, case: &str, why: &str) {
        let line = format!("not measured: {case}: {why}");
        println!("{line}");
        self.omitted.push(line);
    }

    /// Prints the table and writes the file. With `partly`, the file keeps the rows of an earlier run that this run does not
    /// have.
    pub fn finish(&self, name: &str, partly: bool) -> Result<()> {
        println!("\n{HEADER}");
        for row in &self.rows {
            println!("{}", line(row));
        }
        for line in &self.omitted {
            println!("{line}");
        }
        let missed = self.rows.iter().filter(|row| !row.reached()).count();
        println!("{} rows, {missed} below their target", self.rows.len());
        let path = folder()?.join(format!("{name}.json"));
        let mut rows = if partly { self.others(&path) } else { Vec::new() };
        rows.extend(self.rows.iter().map(serde_json::to_value).collect::<Result<Vec<_>, _>>()?);
        std::fs::write(&path, serde_json::to_string_pretty(&rows)? + "\n")
            .with_context(|| format!("writing {}", path.display()))?;
        println!("written: {}", path.display());
        Ok(())
    }
}

impl Report {
    /// Returns the rows of a file that this run does not have.
    fn others(&self, path: &Path) -> Vec<serde_json::Value> {
        let text = std::fs::read(path).unwrap_or_default();
        let mut rows: Vec<serde_json::Value> = serde_json::from_slice(&text).unwrap_or_default();
        rows.retain(|row| !self.rows.iter().any(|own| row["case"] == own.case && row["peer"] == own.peer));
        rows
    }
}

const HEADER: &str = "case                                               ginnel        peer                         peer value   ratio  target  spread";

fn line(row: &Row) -> String {
    let target =
        row.target.map_or_else(|| "-".into(), |t| format!("{t:.2}{}", if row.reached() { "" } else { " !" }));
    format!(
        "{:<46} {:>10.4} {:<6} {:<28} {:>10.4} {:>7.2} {:>7}  {}",
        row.case, row.ginnel, row.unit, row.peer, row.peer_value, row.ratio, target, row.note
    )
}

/// Returns `target/bench` of the workspace.
pub fn folder() -> Result<PathBuf> {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap_or(Path::new(".")).join("target"),
        PathBuf::from,
    );
    let folder = target.join("bench");
    std::fs::create_dir_all(&folder).with_context(|| format!("making {}", folder.display()))?;
    Ok(folder)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_number_of_figures_favours_neither_side() {
        assert!(median(vec![]).is_nan());
        assert_eq!(median(vec![7.0]), 7.0);
        assert_eq!(median(vec![4.0, 2.0]), 3.0);
        assert_eq!(median(vec![9.0, 1.0, 4.0]), 4.0);
        assert_eq!(median(vec![9.0, 1.0, 4.0, 6.0]), 5.0);
    }
}
