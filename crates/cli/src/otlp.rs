//! Where traces go: to the OTLP receiver that the environment names, as every program with OpenTelemetry reads it
//! (`OTEL_EXPORTER_OTLP_ENDPOINT`, `OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_SERVICE_NAME`, `OTEL_TRACES_SAMPLER`, …). Named by nobody: there are none.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bytes::Bytes;
use opentelemetry_http::{HttpClient, HttpError, Request, Response};
use opentelemetry_otlp::{Protocol, SpanExporter, WithExportConfig, WithHttpConfig};
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::trace::SdkTracerProvider;
use tokio::runtime::Handle;

use crate::failure::{Failure, Result};

/// The variables that turn traces on.
const ENDPOINTS: [&str; 2] = ["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"];
/// No receiver is waited for longer.
const PATIENCE: Duration = Duration::from_secs(10);
/// Nor at the end.
const FAREWELL: Duration = Duration::from_secs(3);

/// Traces are made until this ends.
pub(crate) struct Traces {
    provider: SdkTracerProvider,
}

/// Traces are made from now on, if the environment says where they go.
pub(crate) fn start() -> Result<Option<Traces>> {
    let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is_off = set("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"))
        || set("OTEL_TRACES_EXPORTER").is_some_and(|value| value == "none");
    let Some(named) = ENDPOINTS.into_iter().find(|name| set(name).is_some()).filter(|_| !is_off) else {
        return Ok(None);
    };
    let wrong = |problem: String| {
        Failure::usage(format!("{named}: {problem}"))
            .hint("write the address of an OTLP receiver that speaks HTTP, as in http://localhost:4318")
    };
    let client = posthouse_llm::http_client(PATIENCE, None).map_err(|error| wrong(error.problem))?;
    let post = Post { client, runtime: Handle::current(), is_failing: Arc::default() };
    let exporter = SpanExporter::builder()
        .with_http()
        .with_http_client(post)
        .with_protocol(Protocol::HttpBinary)
        .build()
        .map_err(|error| wrong(error.to_string()))?;
    let mut resource = Resource::builder();
    let is_named = set("OTEL_RESOURCE_ATTRIBUTES").is_some_and(|attributes| attributes.contains("service.name="));
    if set("OTEL_SERVICE_NAME").is_none() && !is_named {
        resource = resource.with_service_name("posthouse");
    }
    let provider = SdkTracerProvider::builder().with_batch_exporter(exporter).with_resource(resource.build()).build();
    opentelemetry::global::set_tracer_provider(provider.clone());
    posthouse::trace::enable();
    Ok(Some(Traces { provider }))
}

impl Traces {
    /// Sends what there is.
    pub(crate) async fn end(self) {
        let sent = tokio::task::spawn_blocking(move || self.provider.shutdown_with_timeout(FAREWELL)).await;
        if let Ok(Err(error)) = sent {
            tracing::warn!(target: "posthouse::traces", %error, "the last traces are not sent");
        }
    }
}

/// Posts batches by our client, on our runtime: they come from a thread of their own.
#[derive(Debug)]
struct Post {
    client: reqwest::Client,
    runtime: Handle,
    /// The last one failed: that is said once.
    is_failing: Arc<AtomicBool>,
}

impl HttpClient for Post {
    fn send_bytes<'a, 'b>(
        &'a self,
        request: Request<Bytes>,
    ) -> Pin<Box<dyn Future<Output = Result<Response<Bytes>, HttpError>> + Send + 'b>>
    where
        'a: 'b,
        Self: 'b,
    {
        let (client, is_failing) = (self.client.clone(), self.is_failing.clone());
        let posting = self.runtime.spawn(async move {
            let answer = post(&client, request).await;
            let failure = match &answer {
                Ok(answer) if answer.status().is_success() => None,
                Ok(answer) => Some(answer.status().to_string()),
                // The address may hold a secret, so it is not told.
                Err(error) => Some(error.to_string()),
            };
            if is_failing.swap(failure.is_some(), Ordering::Relaxed) != failure.is_some() {
                match failure {
                    Some(failure) => {
                        tracing::warn!(target: "posthouse::traces", "traces are not taken by their receiver: {failure}")
                    }
                    None => tracing::info!(target: "posthouse::traces", "traces are taken again"),
                }
            }
            answer
        });
        Box::pin(async move { posting.await? })
    }
}

async fn post(client: &reqwest::Client, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
    let (head, body) = request.into_parts();
    let mut posted = reqwest::Request::new(head.method, head.uri.to_string().parse()?);
    *posted.headers_mut() = head.headers;
    *posted.body_mut() = Some(body.into());
    let answer = client.execute(posted).await.map_err(reqwest::Error::without_url)?;
    let mut response = Response::builder().status(answer.status());
    if let Some(headers) = response.headers_mut() {
        *headers = answer.headers().clone();
    }
    Ok(response.body(answer.bytes().await.map_err(reqwest::Error::without_url)?)?)
}
