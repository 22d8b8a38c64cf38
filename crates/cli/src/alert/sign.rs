//! Signatures as the Standard Webhooks specification has them: `v1,` and the base64 of an HMAC-SHA256, one for each secret.

use base64::Engine;
use base64::alphabet::STANDARD as ALPHABET;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig, STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use posthouse_llm::Secret;
use sha2::Sha256;

/// What a secret begins with.
const PREFIX: &str = "whsec_";
/// With or without `=` at the end.
const LENIENT: GeneralPurpose = GeneralPurpose::new(
    &ALPHABET,
    GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
);

/// Signs with every secret there is, so that a receiver may know any one of them.
pub(super) struct Signer {
    keys: Vec<Hmac<Sha256>>,
}

impl Signer {
    /// The error says what is wrong with the secrets without showing them.
    pub(super) fn new(secrets: &[Secret]) -> Result<Self, String> {
        if secrets.is_empty() {
            return Err("holds no secret".to_owned());
        }
        let key = |(place, secret): (usize, &Secret)| {
            let bytes = secret
                .expose()
                .strip_prefix(PREFIX)
                .and_then(|text| LENIENT.decode(text).ok())
                .filter(|bytes| (24..=64).contains(&bytes.len()))
                .ok_or_else(|| {
                    format!(
                        "secret {} is none: it must be whsec_ and the base64 of 24 to 64 bytes; \
                         make one with `echo whsec_$(openssl rand -base64 32)`",
                        place + 1
                    )
                })?;
            Hmac::new_from_slice(&bytes).map_err(|error| error.to_string())
        };
        Ok(Self { keys: secrets.iter().enumerate().map(key).collect::<Result<_, _>>()? })
    }

    /// The value of the header `webhook-signature`.
    pub(super) fn sign(&self, id: &str, timestamp: u64, body: &str) -> String {
        let message = format!("{id}.{timestamp}.{body}");
        let signatures: Vec<String> = self
            .keys
            .iter()
            .map(|key| {
                let mac = key.clone().chain_update(message.as_bytes()).finalize().into_bytes();
                format!("v1,{}", STANDARD.encode(mac))
            })
            .collect();
        signatures.join(" ")
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    /// The example that the specification's own libraries are tested with.
    const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";
    const SIGNATURE: &str = "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=";

    fn sign(secrets: &[&str]) -> String {
        let secrets: Vec<Secret> = secrets.iter().map(|secret| Secret::new(secret)).collect();
        Signer::new(&secrets).unwrap().sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1_614_265_330, r#"{"test": 2432232314}"#)
    }

    #[test]
    fn the_example_of_the_specification() {
        assert_eq!(sign(&[SECRET]), SIGNATURE);
    }

    #[test]
    fn every_secret_signs() {
        let other = "whsec_C2FVsBQIhrscChlQIMV+b5sSYspob7oD";
        let both = sign(&[other, SECRET]);
        assert_eq!(both, format!("{} {SIGNATURE}", sign(&[other])));
        assert_ne!(sign(&[other]), SIGNATURE);
    }

    #[test]
    fn what_is_no_secret_is_refused_and_not_shown() {
        let short = format!("whsec_{}", STANDARD.encode([7; 23]));
        let unpadded = format!("whsec_{}", STANDARD.encode([7; 32]).trim_end_matches('='));
        assert!(Signer::new(&[Secret::new(&unpadded)]).is_ok());
        for text in ["MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw", "whsec_not-base64!", "whsec_", &short] {
            let error = Signer::new(&[Secret::new(SECRET), Secret::new(text)]).err().unwrap();
            assert!(error.starts_with("secret 2 is none"), "{error}");
            assert!(text == "whsec_" || !error.contains(text), "{error}");
        }
        assert!(Signer::new(&[]).is_err());
    }
}
