//! Every name that a span carries, in one place: those of OpenTelemetry's conventions for messaging (semantic conventions 1.37, still in
//! development) and for generative AI (likewise; they have moved to a repository of their own), and ours where they have none.

/// Who moves the messages: always [`SYSTEM_POSTHOUSE`].
pub const SYSTEM: &str = "messaging.system";
/// The value of [`SYSTEM`].
pub const SYSTEM_POSTHOUSE: &str = "posthouse";
/// What is done, as the name of the span begins: `send`, `receive`, `process`.
pub const OPERATION: &str = "messaging.operation.name";
/// The same in the words of the convention.
pub const OPERATION_TYPE: &str = "messaging.operation.type";
/// The queue.
pub const QUEUE: &str = "messaging.destination.name";
/// The job.
pub const JOB: &str = "messaging.message.id";
/// How many jobs were enqueued at once.
pub const JOBS: &str = "messaging.batch.message_count";
/// The worker.
pub const WORKER: &str = "messaging.client.id";

/// The kind of the job.
pub const KIND: &str = "posthouse.job.kind";
/// Whose job it is.
pub const TENANT: &str = "posthouse.job.tenant";
/// Which attempt.
pub const ATTEMPT: &str = "posthouse.job.attempt";
/// What the attempt decided: done, retry, snooze, fail, cancelled, release, lost.
pub const OUTCOME: &str = "posthouse.job.outcome";

/// The class of an error.
pub const ERROR: &str = "error.type";
/// The host that was called.
pub const SERVER: &str = "server.address";
/// Its port.
pub const PORT: &str = "server.port";
/// The status of the answer.
pub const STATUS: &str = "http.response.status_code";

/// What the model was asked for: `chat`.
pub const AI_OPERATION: &str = "gen_ai.operation.name";
/// Whom: the provider's name in the configuration.
pub const AI_PROVIDER: &str = "gen_ai.provider.name";
/// The model that was asked.
pub const AI_REQUEST_MODEL: &str = "gen_ai.request.model";
/// The model that answered.
pub const AI_RESPONSE_MODEL: &str = "gen_ai.response.model";
/// The provider's id of the answer.
pub const AI_RESPONSE_ID: &str = "gen_ai.response.id";
/// Why the model stopped.
pub const AI_FINISH_REASONS: &str = "gen_ai.response.finish_reasons";
/// Seconds to the first piece of the answer.
pub const AI_FIRST_CHUNK: &str = "gen_ai.response.time_to_first_chunk";
/// Tokens of the prompt.
pub const AI_INPUT_TOKENS: &str = "gen_ai.usage.input_tokens";
/// Tokens of the answer.
pub const AI_OUTPUT_TOKENS: &str = "gen_ai.usage.output_tokens";
/// The part of the prompt's tokens that came from the provider's cache.
pub const AI_CACHED_TOKENS: &str = "gen_ai.usage.cache_read.input_tokens";
/// The part of the answer's tokens that was reasoning.
pub const AI_REASONING_TOKENS: &str = "gen_ai.usage.reasoning.output_tokens";
