//! Enumerations that are written as words.

/// Defines an enumeration whose values are words in configurations, on command lines and in JSON. The crate that uses this macro
/// must depend on serde.
#[macro_export]
macro_rules! words {
    ($(#[$doc:meta])* $name:ident { $($(#[$value_doc:meta])* $value:ident = $word:literal),+ $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
        pub enum $name {
            $($(#[$value_doc])* #[serde(rename = $word)] $value,)+
        }

        impl $name {
            /// All words of the enumeration.
            pub const WORDS: &[&str] = &[$($word),+];

            /// Returns the word for this value.
            pub fn word(self) -> &'static str {
                match self { $(Self::$value => $word,)+ }
            }
        }

        impl std::str::FromStr for $name {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                match text {
                    $($word => Ok(Self::$value),)+
                    _ => Err(format!("{text:?} is not one of {}", Self::WORDS.join(", "))),
                }
            }
        }

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.pad(self.word())
            }
        }
    };
}

words! {
    /// The form of log lines.
    LogFormat {
        /// Text for people.
        #[default]
        Text = "text",
        /// One JSON object per line.
        Json = "json",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_for_an_unknown_word_lists_the_words() {
        assert_eq!("json".parse(), Ok(LogFormat::Json));
        assert_eq!("JSON".parse::<LogFormat>().unwrap_err(), "\"JSON\" is not one of text, json");
        assert_eq!(format!("{:>6}", LogFormat::default()), "  text");
    }
}
