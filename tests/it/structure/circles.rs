//! No two files of a crate import each other, be it over others: whoever reads one of them need not read them all at once.

use std::collections::{BTreeMap, BTreeSet};

use super::{sources, without_tests};

/// What each module names of its own crate, as paths from the crate's root. The root is "".
type Named = BTreeMap<String, Vec<String>>;

fn parent(module: &str) -> &str {
    module.rsplit_once("::").map_or("", |(parent, _)| parent)
}

fn last(path: &str) -> &str {
    path.rsplit("::").next().unwrap()
}

fn named(files: &[(String, String)]) -> Named {
    let module = |path: &str| {
        let module = path.split_once("src/").unwrap().1.trim_end_matches(".rs").replace('/', "::");
        if matches!(last(&module), "mod" | "lib" | "main") { parent(&module).to_owned() } else { module }
    };
    let code = |text| without_tests(text).lines().map(|l| l.split("//").next().unwrap()).collect::<Vec<_>>().join("\n");
    let modules: Vec<String> = files.iter().map(|(path, _)| module(path)).collect();
    let paths = |text, of: &String| paths(&code(text).replace(" as ", "::as::"), of, &modules);
    files.iter().zip(&modules).map(|((_, text), module)| (module.clone(), paths(text, module))).collect()
}

/// The paths in a text that begin with `crate`, `super`, `self` or a module below; `super::a::{b, c}` are two.
fn paths(code: &str, module: &str, modules: &[String]) -> Vec<String> {
    let word = |c: char| c.is_alphanumeric() || c == '_' || c == ':';
    let children = modules.iter().filter(|m| !m.is_empty() && parent(m) == module).map(|m| last(m));
    let starts: Vec<String> = children.chain(["crate", "super", "self"]).map(|start| format!("{start}::")).collect();
    let mut found = Vec::new();
    for (at, _) in starts.iter().flat_map(|s| code.match_indices(s)).filter(|(at, _)| !code[..*at].ends_with(word)) {
        let (mut path, mut groups) = (String::new(), Vec::new());
        for c in code[at..].chars() {
            match c {
                '{' => groups.push(path.len()),
                ',' | '}' if !groups.is_empty() => {
                    found.push(path.clone());
                    groups.truncate(groups.len() - usize::from(c == '}'));
                    path.truncate(groups.last().copied().unwrap_or_default());
                }
                c if word(c) || c == '*' => path.push(c),
                c if c.is_whitespace() && !groups.is_empty() => {}
                _ => break,
            }
        }
        found.push(path);
    }
    found.retain(|path| !path.is_empty() && !path.ends_with("::"));
    found.iter().map(|path| from_the_root(path, module)).collect()
}

fn from_the_root(mut path: &str, mut module: &str) -> String {
    while let Some(rest) = path.strip_prefix("super::") {
        (path, module) = (rest, parent(module));
    }
    let whole = format!("{module}::{}", path.trim_start_matches("self::"));
    path.strip_prefix("crate::").unwrap_or(whole.trim_start_matches("::")).trim_end_matches("::self").to_owned()
}

/// The module that a path leads to, through those that only hand the name on.
fn home<'a>(path: &'a str, named: &'a Named) -> &'a str {
    let mut module = path;
    while !named.contains_key(module) {
        module = parent(module);
    }
    let name = path[module.len()..].trim_start_matches("::").split("::").next().unwrap();
    let handed_on = named[module].iter().find(|p| !name.is_empty() && last(p) == name && parent(p) != module);
    handed_on.map_or(module, |further| home(further, named))
}

/// The imports that are part of a circle, as `from -> to`.
fn circles(files: &[(String, String)]) -> Vec<String> {
    let named = named(files);
    let homes = |module: &str| -> BTreeSet<&str> {
        named[module].iter().map(|path| home(path, &named)).filter(|home| *home != module).collect()
    };
    let imports: BTreeMap<&str, BTreeSet<&str>> = named.keys().map(|module| (module.as_str(), homes(module))).collect();
    let reaches = |from: &str, goal: &str| {
        let (mut seen, mut next) = (BTreeSet::new(), vec![from]);
        while let Some(module) = next.pop() {
            if seen.insert(module) {
                next.extend(&imports[module]);
            }
        }
        seen.contains(goal)
    };
    let all = imports.iter().flat_map(|(from, to)| to.iter().map(move |to| (from, to)));
    all.filter(|(from, to)| reaches(to, from)).map(|(from, to)| format!("{from} -> {to}")).collect()
}

#[test]
fn no_files_import_each_other_in_a_circle() {
    for folder in ["src", "crates/llm/src", "crates/cli/src", "bench/src"] {
        let circles = circles(&sources(folder));
        assert!(circles.is_empty(), "files of {folder} import each other in a circle:\n{}", circles.join("\n"));
    }
}

#[test]
fn a_circle_is_seen_through_names_that_are_handed_on() {
    let file = |path: &str, text: &str| (format!("src/{path}"), text.to_owned());
    let mut files = [
        file("lib.rs", "mod a; mod b; mod c;\npub use c::C;"),
        file("c.rs", "//! Like crate::a.\nuse crate::{b::B, a::X};"),
        file("a/mod.rs", "mod x;\npub use x::{X, Y as Z};"),
        file("a/x.rs", "use crate::b::{\n    self, B,\n};"),
        file("b.rs", "fn f() { super::a::Z::new() }\n#[cfg(test)] use crate::c::C;"),
    ];
    assert_eq!(circles(&files), ["a::x -> b", "b -> a::x"]);
    files[4].1.clear();
    assert!(circles(&files).is_empty());
}
