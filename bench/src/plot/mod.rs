//! Charts of how figures went over time: one SVG, a panel for each kind of value, a line for each run. Readable on light and
//! on dark ground.

mod axis;

use std::fmt::{self, Write as _};

use crate::figure::Course;
use crate::report::Report;
use axis::Axis;

/// Everything is in pixels of a drawing as wide as a page of text.
const WIDTH: f64 = 860.0;
const LEFT: f64 = 76.0;
const RIGHT: f64 = 20.0;
/// Above the first panel: the title and the line below it.
const HEAD: f64 = 64.0;
/// Of a panel: its title and its legend.
const ABOVE: f64 = 50.0;
const PLOT: f64 = 190.0;
/// Of a panel: labels of the ticks, and the axis' name.
const BELOW: f64 = 56.0;
/// Rough width of a letter of the legend.
const LETTER: f64 = 7.2;
/// Steps of an axis, at most.
const STEPS_UP: f64 = 5.0;
const STEPS_ALONG: f64 = 10.0;

/// Colours that people who see few of them tell apart, for light and for dark ground; the dashes help in print.
const LINES: [(&str, &str, &str); 6] = [
    ("#0072b2", "#56b4e9", "none"),
    ("#d55e00", "#ff9e4a", "7 3"),
    ("#007f5f", "#3ddbaa", "2 3"),
    ("#a8388a", "#e39ac4", "10 3 2 3"),
    ("#8a6d00", "#f0d442", "4 4"),
    ("#444444", "#c8c8c8", "1 2"),
];

/// The values of one kind of one scenario.
struct Panel<'a> {
    scenario: &'static str,
    lines: Vec<&'a Course>,
}

/// The chart of a report, of its last round. `None`: nothing was measured over time.
#[must_use]
pub fn svg(report: &Report) -> Option<String> {
    let panels = panels(report);
    let caption = format!(
        "Posthouse {} ({} build) on PostgreSQL {}, {}",
        report.posthouse, report.build, report.postgres, report.started_at
    );
    let mut text = String::new();
    // Writing to a string cannot fail.
    (!panels.is_empty()).then(|| draw(&mut text, &panels, &caption).ok())?.map(|()| text)
}

fn panels(report: &Report) -> Vec<Panel<'_>> {
    let mut panels: Vec<Panel<'_>> = Vec::new();
    for scenario in &report.scenarios {
        for course in scenario.figures.iter().filter_map(|figure| figure.courses.last()) {
            let fits = |panel: &&mut Panel<'_>| panel.scenario == scenario.name && panel.lines[0].of == course.of;
            match panels.iter_mut().find(fits) {
                Some(panel) => panel.lines.push(course),
                None => panels.push(Panel { scenario: scenario.name, lines: vec![course] }),
            }
        }
    }
    panels
}

fn draw(text: &mut String, panels: &[Panel<'_>], caption: &str) -> fmt::Result {
    let each = ABOVE + PLOT + BELOW;
    let height = panels.iter().fold(HEAD, |height, _| height + each);
    writeln!(
        text,
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" width=\"{WIDTH}\" height=\"{height}\" role=\"img\">"
    )?;
    text.push_str("<title>Throughput and latency over time</title>\n");
    style(text)?;
    writeln!(text, "<rect class=\"ground\" width=\"{WIDTH}\" height=\"{height}\"/>")?;
    writeln!(text, "<text class=\"head\" x=\"16\" y=\"30\">Throughput and latency over time</text>")?;
    writeln!(text, "<text class=\"faint\" x=\"16\" y=\"50\">{}</text>", escaped(caption))?;
    let mut top = HEAD;
    for panel in panels {
        panel.draw(text, top)?;
        top += each;
    }
    text.push_str("</svg>\n");
    Ok(())
}

fn style(text: &mut String) -> fmt::Result {
    text.push_str(
        "<style>\ntext { font: 12px system-ui, 'Helvetica Neue', Arial, sans-serif; fill: #24292f }\n\
         .head { font-size: 17px; font-weight: 600 }\n.name { font-size: 14px; font-weight: 600 }\n\
         .faint { fill: #59636e }\n.ground { fill: #ffffff }\n.grid { stroke: #d8dee4; stroke-width: 1 }\n\
         .axis { stroke: #59636e; stroke-width: 1 }\n.line { fill: none; stroke-width: 1.8; stroke-linejoin: round }\n",
    );
    for (n, (light, _, dash)) in LINES.iter().enumerate() {
        writeln!(text, ".l{n} {{ stroke: {light}; stroke-dasharray: {dash} }}")?;
    }
    text.push_str(
        "@media (prefers-color-scheme: dark) {\ntext { fill: #e6edf3 }\n.faint { fill: #9aa4af }\n.ground { fill: #0d1117 }\n\
         .grid { stroke: #2b323b }\n.axis { stroke: #9aa4af }\n",
    );
    for (n, (_, dark, _)) in LINES.iter().enumerate() {
        writeln!(text, ".l{n} {{ stroke: {dark} }}")?;
    }
    text.push_str("}\n</style>\n");
    Ok(())
}

impl Panel<'_> {
    fn draw(&self, text: &mut String, top: f64) -> fmt::Result {
        let largest =
            |of: fn(&(f64, f64)) -> f64| self.lines.iter().flat_map(|l| &l.points).map(of).fold(0.0, f64::max);
        let (along, up) = (Axis::seconds(largest(|p| p.0), STEPS_ALONG), Axis::to(largest(|p| p.1), STEPS_UP));
        let (unit, of) = (self.lines[0].unit, self.lines[0].of);
        writeln!(
            text,
            "<text class=\"name\" x=\"{LEFT}\" y=\"{:.1}\">{}</text>",
            top + 16.0,
            escaped(&format!("{}: {of}, {unit}", self.scenario))
        )?;
        self.legend(text, top + 36.0)?;
        let area = Area { top: top + ABOVE, along, up };
        area.draw(text)?;
        for (n, line) in self.lines.iter().enumerate() {
            let points: Vec<_> = line.points.iter().map(|p| format!("{:.1},{:.1}", area.x(p.0), area.y(p.1))).collect();
            writeln!(text, "<polyline class=\"line l{}\" points=\"{}\"/>", n % LINES.len(), points.join(" "))?;
        }
        Ok(())
    }

    fn legend(&self, text: &mut String, y: f64) -> fmt::Result {
        let mut x = LEFT;
        for (n, line) in self.lines.iter().enumerate() {
            let (end, class) = (x + 26.0, n % LINES.len());
            writeln!(text, "<path class=\"line l{class}\" d=\"M{x:.1} {:.1}H{end:.1}\"/>", y - 4.0)?;
            writeln!(text, "<text x=\"{:.1}\" y=\"{y:.1}\">{}</text>", end + 6.0, escaped(&line.line))?;
            x = line.line.chars().fold(end + 30.0, |x, _| x + LETTER);
        }
        Ok(())
    }
}

/// Where the lines are.
struct Area {
    top: f64,
    along: Axis,
    up: Axis,
}

impl Area {
    fn x(&self, value: f64) -> f64 {
        LEFT + (WIDTH - LEFT - RIGHT) * value / self.along.end()
    }

    fn y(&self, value: f64) -> f64 {
        self.top + PLOT * (1.0 - value / self.up.end())
    }

    fn draw(&self, text: &mut String) -> fmt::Result {
        let (bottom, right) = (self.top + PLOT, WIDTH - RIGHT);
        for tick in &self.up.ticks {
            let (y, label) = (self.y(*tick), self.up.label(*tick));
            let class = if *tick > 0.0 { "grid" } else { "axis" };
            writeln!(text, "<path class=\"{class}\" d=\"M{LEFT} {y:.1}H{right}\"/>")?;
            writeln!(text, "<text text-anchor=\"end\" x=\"{}\" y=\"{:.1}\">{label}</text>", LEFT - 8.0, y + 4.0)?;
        }
        for tick in &self.along.ticks {
            let (x, label) = (self.x(*tick), self.along.clock(*tick));
            writeln!(text, "<path class=\"axis\" d=\"M{x:.1} {bottom:.1}v5\"/>")?;
            writeln!(text, "<text text-anchor=\"middle\" x=\"{x:.1}\" y=\"{:.1}\">{label}</text>", bottom + 20.0)?;
        }
        let unit = if self.along.end() > 60.0 { "time, minutes:seconds" } else { "time, s" };
        let (x, y) = (f64::midpoint(LEFT, right), bottom + 40.0);
        writeln!(text, "<text class=\"faint\" text-anchor=\"middle\" x=\"{x}\" y=\"{y:.1}\">{unit}</text>")
    }
}

/// Text that is no markup, whatever it says.
fn escaped(text: &str) -> String {
    let mut safe = String::new();
    for c in text.chars() {
        match c {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            // XML has no way to say them.
            c if c.is_control() => safe.push('\u{fffd}'),
            c => safe.push(c),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn course(of: &'static str, line: &str, points: &[(f64, f64)]) -> Course {
        Course { of, unit: "ms", line: line.to_owned(), points: points.to_vec() }
    }

    fn drawn(lines: &[Course]) -> String {
        let panels: Vec<_> = lines.iter().map(|line| Panel { scenario: "some", lines: vec![line] }).collect();
        let mut text = String::new();
        draw(&mut text, &panels, "Post & house <1>").unwrap();
        text
    }

    /// The names of elements, in order, if every one is closed by its like.
    fn elements(xml: &str) -> Vec<String> {
        let (mut open, mut names) = (Vec::new(), Vec::new());
        for tag in xml.split('<').skip(1) {
            let (tag, text) = tag.split_once('>').unwrap();
            assert!(!text.contains('>') || open.last() == Some(&"style"), "{text}");
            let rest = text.replace("&amp;", "").replace("&lt;", "").replace("&gt;", "").replace("&quot;", "");
            assert!(!rest.contains('&'), "{text}");
            assert!(tag.matches('"').count().is_multiple_of(2), "{tag}");
            match tag.strip_prefix('/') {
                Some(name) => assert_eq!(open.pop(), Some(name)),
                None => {
                    let name = tag.split([' ', '/']).next().unwrap();
                    names.push(name.to_owned());
                    open.extend((!tag.ends_with('/')).then_some(name));
                }
            }
        }
        assert_eq!(open, Vec::<&str>::new());
        names
    }

    #[test]
    fn it_is_well_formed_whatever_the_names_are() {
        let lines = [course("\"p99\" & more", "</text><script>", &[(0.5, 1.0), (1.5, 4.0)]), course("b", "\u{1}", &[])];
        let names = elements(&drawn(&lines));
        assert_eq!(names[0], "svg");
        assert_eq!(names.iter().filter(|name| *name == "polyline").count(), 2);
        assert!(!names.contains(&"script".to_owned()));
    }

    #[test]
    fn lines_stay_inside_and_larger_is_higher() {
        let text = drawn(&[course("p99", "a", &[(0.0, 0.0), (300.0, 40.0), (600.0, 12.0)])]);
        let points = text.split("points=\"").nth(1).unwrap().split('"').next().unwrap();
        let points: Vec<Vec<f64>> =
            points.split(' ').map(|p| p.split(',').map(|n| n.parse().unwrap()).collect()).collect();
        let (bottom, top) = (HEAD + ABOVE + PLOT, HEAD + ABOVE);
        assert_eq!(
            points,
            [[LEFT, bottom], [f64::midpoint(LEFT, WIDTH - RIGHT), top], [WIDTH - RIGHT, top + PLOT * 0.7]]
        );
    }
}
