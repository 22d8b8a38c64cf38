//! Traces: one from the enqueue over the claim and the attempt to the call, across processes, as a receiver gets it.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::sync::{Arc, Mutex};

use opentelemetry_proto::tonic::collector::trace::v1::ExportTraceServiceRequest;
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::trace::v1::Span as Sent;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use prost::Message;

use crate::processes::Running;
use crate::support::{Queue, answer, posthouse};

/// An OTLP receiver over HTTP: takes everything, keeps it, and says this.
struct Sink {
    port: u16,
    books: Arc<Mutex<Books>>,
}

#[derive(Default)]
struct Books {
    spans: Vec<Span>,
    /// Everything that came, for looking for what should not be there.
    raw: Vec<u8>,
    heads: Vec<String>,
}

#[derive(Debug, Clone)]
struct Span {
    service: String,
    trace: Vec<u8>,
    id: Vec<u8>,
    parent: Vec<u8>,
    name: String,
    kind: SpanKind,
    failed: bool,
    values: BTreeMap<String, String>,
}

impl Sink {
    fn start(status: &'static str) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let books = Arc::new(Mutex::new(Books::default()));
        let shared = books.clone();
        std::thread::spawn(move || {
            for connection in listener.incoming().map_while(Result::ok) {
                let books = shared.clone();
                std::thread::spawn(move || while take(&connection, &books, status).is_some() {});
            }
        });
        Self { port, books }
    }

    /// The command, with its traces going here.
    fn traced<'a>(&self, command: &'a mut Command) -> &'a mut Command {
        command.env("OTEL_EXPORTER_OTLP_ENDPOINT", format!("http://127.0.0.1:{}", self.port))
    }

    fn spans(&self) -> Vec<Span> {
        self.books.lock().unwrap().spans.clone()
    }

    /// The only span of this name.
    #[track_caller]
    fn span(&self, name: &str) -> Span {
        let spans = self.spans();
        let mut found = spans.iter().filter(|span| span.name == name);
        let span = found.next().unwrap_or_else(|| panic!("no {name} in {spans:#?}")).clone();
        assert!(found.next().is_none(), "several {name} in {spans:#?}");
        span
    }
}

/// One request. `None`: there are no more on this connection.
fn take(connection: &TcpStream, books: &Mutex<Books>, status: &str) -> Option<()> {
    let mut reader = BufReader::new(connection);
    let (mut head, mut length) = (String::new(), 0);
    loop {
        let begin = head.len();
        if reader.read_line(&mut head).ok()? == 0 {
            return None;
        }
        let line = head[begin..].trim_end().to_ascii_lowercase();
        if let Some(value) = line.strip_prefix("content-length: ") {
            length = value.parse().ok()?;
        }
        if line.is_empty() {
            break;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body).ok()?;
    let request = ExportTraceServiceRequest::decode(&body[..]).unwrap();
    let mut books = books.lock().unwrap();
    for resource in request.resource_spans {
        let values = resource.resource.unwrap().attributes;
        let named = values.iter().find(|pair| pair.key == "service.name").unwrap();
        let service = text(named.value.clone().and_then(|value| value.value));
        let sent = resource.scope_spans.into_iter().flat_map(|scope| scope.spans);
        books.spans.extend(sent.map(|span| read(span, &service)));
    }
    books.raw.extend(body);
    books.heads.push(head);
    let mut connection = connection;
    write!(connection, "HTTP/1.1 {status}\r\ncontent-length: 0\r\n\r\n").ok()
}

fn read(span: Sent, service: &str) -> Span {
    assert!(span.end_time_unix_nano >= span.start_time_unix_nano && span.start_time_unix_nano > 0, "{span:?}");
    Span {
        service: service.to_owned(),
        kind: span.kind(),
        failed: span.status.as_ref().is_some_and(|status| status.code == 2),
        trace: span.trace_id,
        id: span.span_id,
        parent: span.parent_span_id,
        name: span.name,
        values: span
            .attributes
            .into_iter()
            .map(|pair| (pair.key, text(pair.value.and_then(|value| value.value))))
            .collect(),
    }
}

fn text(value: Option<Value>) -> String {
    match value {
        Some(Value::StringValue(text)) => text,
        Some(Value::IntValue(number)) => number.to_string(),
        Some(Value::DoubleValue(number)) => number.to_string(),
        Some(Value::ArrayValue(values)) => {
            values.values.into_iter().map(|value| text(value.value)).collect::<Vec<_>>().join(",")
        }
        other => panic!("{other:?}"),
    }
}

#[track_caller]
fn has(span: &Span, values: &[(&str, &str)]) {
    for (name, value) in values {
        assert_eq!(span.values.get(*name).map(String::as_str), Some(*value), "{name} of {span:#?}");
    }
}

#[tokio::test]
async fn one_trace_goes_from_the_enqueue_to_the_call_across_processes() {
    let (queue, sink) = (Queue::new().await, Sink::start("200 OK"));
    let mut sim = posthouse();
    let sim = Running::start(sim.args(["sim", "--json"]));
    let ready: serde_json::Value = serde_json::from_str(&sim.line("base_url")).unwrap();
    let provider = ready["base_url"].as_str().unwrap();
    let secret = "the sesame of the payload";
    let payload = format!("{{\"text\": \"{secret}\"}}");
    answer(sink.traced(&mut queue.command(&["enqueue", "summarize", &payload, "--tenant", "acme"])), None).fine();
    let work = ["work", "--until-empty", "--model", "sim", "--provider-url", provider];
    let mut worker = queue.command(&work);
    worker.env("OTEL_SERVICE_NAME", "crew").env("OTEL_EXPORTER_OTLP_HEADERS", "x-key=sesame-of-the-header");
    answer(sink.traced(&mut worker), None).fine();

    let (send, receive) = (sink.span("send default"), sink.span("receive default"));
    let (process, chat) = (sink.span("process default"), sink.span("chat sim"));
    assert_eq!(sink.spans().len(), 4, "{:#?}", sink.spans());
    for span in [&receive, &process, &chat] {
        assert_eq!(span.trace, send.trace, "{span:#?}");
    }
    assert!(send.parent.is_empty());
    assert_eq!((&receive.parent, &process.parent, &chat.parent), (&send.id, &send.id, &process.id));
    assert_eq!((send.kind, receive.kind), (SpanKind::Producer, SpanKind::Client));
    assert_eq!((process.kind, chat.kind), (SpanKind::Consumer, SpanKind::Client));
    assert_eq!((send.service.as_str(), process.service.as_str()), ("posthouse", "crew"));
    for (span, operation) in [(&send, "send"), (&receive, "receive"), (&process, "process")] {
        has(span, &[("messaging.system", "posthouse"), ("messaging.destination.name", "default")]);
        has(span, &[("messaging.operation.name", operation), ("messaging.operation.type", operation)]);
    }
    has(
        &process,
        &[("messaging.message.id", "1"), ("posthouse.job.kind", "summarize"), ("posthouse.job.tenant", "acme")],
    );
    has(&process, &[("posthouse.job.attempt", "1"), ("posthouse.job.outcome", "done")]);
    assert_eq!(process.values["messaging.client.id"], receive.values["messaging.client.id"]);
    has(&chat, &[("gen_ai.operation.name", "chat"), ("gen_ai.request.model", "sim"), ("server.address", "127.0.0.1")]);
    has(&chat, &[("http.response.status_code", "200"), ("gen_ai.response.finish_reasons", "stop")]);
    assert!(chat.values["gen_ai.usage.input_tokens"].parse::<u64>().unwrap() > 0, "{chat:#?}");

    let books = sink.books.lock().unwrap();
    assert!(books.heads.iter().all(|head| head.starts_with("POST /v1/traces ")), "{:?}", books.heads);
    assert!(books.heads.iter().any(|head| head.to_ascii_lowercase().contains("x-key: sesame-of-the-header")));
    let said = String::from_utf8_lossy(&books.raw);
    assert!(!said.contains("sesame"), "neither prompt nor key is in a span");
}

#[tokio::test]
async fn each_attempt_is_a_span_and_one_that_fails_says_so() {
    let (queue, sink) = (Queue::new().await, Sink::start("200 OK"));
    answer(sink.traced(&mut queue.command(&["enqueue", "k", "--max-attempts", "2"])), None).fine();
    let exec = "k=test $POSTHOUSE_ATTEMPT = 2 || { echo sesame >&2; exit 1; }; printf '\"%s\"' $TRACEPARENT";
    let mut worker = queue.command(&["work", "--until-empty", "--exec", exec]);
    answer(sink.traced(worker.env("TRACEPARENT", "of the worker")), None).fine();
    let send = sink.span("send default");
    let mut attempts: Vec<Span> = sink.spans().into_iter().filter(|span| span.name == "process default").collect();
    attempts.sort_by_key(|span| span.values["posthouse.job.attempt"].clone());
    assert_eq!(attempts.len(), 2, "{attempts:#?}");
    assert!(attempts.iter().all(|span| span.trace == send.trace && span.parent == send.id), "{attempts:#?}");
    has(&attempts[0], &[("posthouse.job.outcome", "retry"), ("error.type", "exit")]);
    has(&attempts[1], &[("posthouse.job.outcome", "done")]);
    assert_eq!((attempts[0].failed, attempts[1].failed), (true, false));
    // A program goes on with the span of its attempt.
    let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let told = queue.run(&["job", "show", "1", "--json"]).fine().json()["result"].as_str().unwrap().to_owned();
    assert_eq!(told, format!("00-{}-{}-01", hex(&send.trace), hex(&attempts[1].id)));
    assert!(!String::from_utf8_lossy(&sink.books.lock().unwrap().raw).contains("sesame"), "no text of errors");
}

#[tokio::test]
async fn a_trace_is_taken_over_from_the_shell_and_handed_on_without_any_receiver() {
    let queue = Queue::new().await;
    let parent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    answer(queue.command(&["enqueue", "k"]).env("TRACEPARENT", parent), None).fine();
    answer(queue.command(&["enqueue", "k"]).env("TRACEPARENT", "nonsense"), None).fine();
    queue.run(&["work", "--until-empty", "--exec", "k=printf '\"%s\"' $TRACEPARENT"]).fine();
    let result = |id: &str| queue.run(&["job", "show", id, "--json"]).fine().json()["result"].clone();
    assert_eq!((result("1"), result("2")), (parent.into(), "".into()));
    // With a receiver, the enqueue is a span below it.
    let sink = Sink::start("200 OK");
    answer(sink.traced(&mut queue.command(&["enqueue", "k"])).env("TRACEPARENT", parent), None).fine();
    let lines = "{\"kind\":\"k\"}\n{\"kind\":\"k\"}\n";
    answer(sink.traced(&mut queue.command(&["enqueue", "--jsonl", "-"])), Some(lines.as_bytes())).fine();
    let spans = sink.spans();
    assert_eq!(spans.len(), 2, "{spans:#?}");
    assert_eq!((spans[0].trace[0], spans[0].parent[1]), (0x4b, 0xf0));
    has(&spans[1], &[("messaging.batch.message_count", "2")]);
    let traces = queue
        .texts("select distinct p.trace ->> 'traceparent' from posthouse.payload p where p.trace is not null")
        .await;
    assert_eq!(traces.len(), 3, "{traces:?}");
}

#[tokio::test]
async fn a_receiver_that_is_gone_or_refuses_holds_nobody_up_and_is_told_once() {
    let queue = Queue::new().await;
    for (sink, told) in [(Some(Sink::start("503 Service Unavailable")), "503"), (None, "error sending request")] {
        let port = sink.as_ref().map_or(1, |sink| sink.port);
        let endpoint = format!("http://127.0.0.1:{port}");
        queue.enqueue(&["k"]);
        let mut worker = queue.command(&["work", "--until-empty", "--exec", "k=true"]);
        worker.env("OTEL_EXPORTER_OTLP_ENDPOINT", endpoint);
        let said = answer(&mut worker, None).fine();
        assert!(said.stdout.contains("ended: 1 done"), "{said:?}");
        let lines: Vec<&str> = said.stderr.lines().filter(|line| line.contains("traces are not taken")).collect();
        assert!(lines.len() == 1 && lines[0].contains(told), "{said:?}");
    }
}

#[tokio::test]
async fn an_endpoint_that_is_none_is_named_and_others_make_no_traces() {
    let queue = Queue::new().await;
    let enqueue = || queue.command(&["enqueue", "k"]);
    let wrong = answer(enqueue().env("OTEL_EXPORTER_OTLP_ENDPOINT", "not an address"), None);
    wrong.failed(2, &["OTEL_EXPORTER_OTLP_ENDPOINT", "http://localhost:4318"]);
    let sink = Sink::start("200 OK");
    answer(sink.traced(&mut enqueue()).env("OTEL_SDK_DISABLED", "true"), None).fine();
    answer(sink.traced(&mut enqueue()).env("OTEL_TRACES_EXPORTER", "none"), None).fine();
    answer(sink.traced(&mut enqueue()).env("OTEL_TRACES_SAMPLER", "always_off"), None).fine();
    assert!(sink.spans().is_empty());
}
