package app

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"posthaste/api"
	"posthaste/credits"
	"posthaste/internal/cli"
	"posthaste/internal/redisurl"
	"posthaste/internal/secretfile"
	"posthaste/internal/tlsfile"
	"posthaste/outbox"
	"posthaste/relay"
	"posthaste/sink"
	"posthaste/sink/jetstream"
	"posthaste/sql"
)

// defaultPostgresURL is used if neither the setting nor a libpq variable is set.
const defaultPostgresURL = "postgres://localhost:5432/postgres"

// Settings are all settings. The parser of the command line decodes them, and Parse names all that is wrong with them
// at once. docs/configuration.md is generated from the struct.
type Settings struct {
	ServerSettings  `group:"Servers"`
	NameSettings    `group:"Names"`
	RelaySettings   `group:"Relay"`
	APISettings     `group:"API"`
	AdminSettings   `group:"Admin listener"`
	ProcessSettings `group:"Process"`

	// Given are the names of the flags on the command line. It is no setting: main fills it in.
	Given []string `kong:"-"`

	decoded *decoded
}

// ServerSettings are about Postgres and Redis. An empty GuardRedisURL is RedisURL, an empty SinkURL Redis.
type ServerSettings struct {
	PostgresURL     string          `placeholder:"postgres://localhost:5432/postgres"`
	RedisURL        string          `default:"redis://localhost:6379/0"`
	GuardRedisURL   string          `placeholder:"redis://localhost:6380/0"`
	RedisDurability sink.Durability `type:"durability" default:"none"`
	SinkURL         string          `name:"sink-url" placeholder:"nats://localhost:4222"`
	SinkDurability  string          `type:"choice" of:"fsync,none" default:"fsync"`
	SinkReplicas    int             `type:"number" least:"1" most:"5" default:"1"`
	RedisCA         string          `name:"redis-ca"`
	RedisCert       string          `help:"PEM file with the certificate to show to Redis."`
	RedisKey        string          `help:"PEM file with its key."`
	RedisSkipVerify OnOff           `type:"choice" of:"on,off" default:"off"`
}

// NameSettings name what one outbox consists of. SharedStreams lets other databases publish to the same streams.
type NameSettings struct {
	Schema        string `help:"Schema of posthaste's tables." default:"public"`
	RelayName     string `placeholder:"default"`
	StreamPrefix  string `help:"The stream is this prefix and the aggregate type." default:"outbox."`
	SharedStreams OnOff  `type:"choice" of:"on,off" default:"off"`
}

// RelaySettings are those of the relay.
type RelaySettings struct {
	Pubsub        OnOff         `type:"choice" of:"on,off" default:"on"`
	ChannelPrefix string        `help:"The channel is this prefix and the event type."`
	History       time.Duration `help:"How long delivered events are kept; 0 keeps none." type:"period" default:"72h"`
	Restore       time.Duration `type:"restore" default:"1h"`
	WALBudget     int64         `name:"wal-budget" type:"size" least:"16MiB" default:"1GiB"`
	Window        int           `type:"number" least:"1" most:"10000000" default:"10000"`
	WindowBytes   int           `help:"Bytes of such events." type:"size" least:"1MiB" default:"64MiB"`
	SweepWorkers  int           `type:"number" least:"1" most:"16" default:"2"`
	Poison        relay.Poison  `type:"choice" of:"skip,block-key" default:"skip"`
	Trim          string        `type:"choice" of:"acked,force" default:"acked"`
	StreamMaxlen  int64         `type:"number" least:"0" most:"1099511627776" default:"1000000"`
}

// APISettings are those of the public API. See api.Options.
type APISettings struct {
	HTTPAddr         string         `name:"http-addr" help:"Public API." default:"127.0.0.1:8080"`
	HTTPTLSCert      string         `name:"http-tls-cert"`
	HTTPTLSKey       string         `name:"http-tls-key" help:"PEM file with its key."`
	HTTPClientCA     string         `name:"http-client-ca" help:"PEM file with CAs: require certificates by them."`
	RateLimit        float64        `type:"rate" default:"0"`
	AddressRateLimit float64        `type:"rate" default:"0"`
	TrustedProxies   []netip.Prefix `type:"networks"`
	MaxConnections   int            `type:"number" least:"1" most:"1000000" default:"10000"`
	KeyMaxAge        time.Duration  `type:"period" default:"0"`
	Auth             string         `type:"choice" of:"none,keys,jwt" default:"none"`
	AuthKeysFile     string
	JWTIssuer        string `name:"jwt-issuer" help:"With auth=jwt: the issuer (iss) of the tokens, exactly."`
	JWTAudience      string `name:"jwt-audience" help:"With auth=jwt: the audience (aud) of the tokens."`
	JWTJWKS          string `name:"jwt-jwks"`
	JWTUserClaim     string `name:"jwt-user-claim" default:"sub"`
	JWTScopeClaim    string `name:"jwt-scope-claim" default:"scope"`
}

// AdminSettings are those of the admin listener. AdminReadToken may only read. AdminHosts are further names of it.
// AdminOpen allows it beyond loopback without a token.
type AdminSettings struct {
	AdminAddr      string `placeholder:"127.0.0.1:9090"`
	AdminToken     string `help:"Bearer token that everything on the admin listener requires but health and metrics."`
	AdminReadToken string
	AdminHosts     []string `type:"hosts"`
	AdminOpen      OnOff    `type:"choice" of:"on,off" default:"off"`
	AdminPprof     OnOff    `help:"Serve profiles: on or off." type:"choice" of:"on,off" default:"off"`
	AdminTLSCert   string   `name:"admin-tls-cert"`
	AdminTLSKey    string   `name:"admin-tls-key" help:"PEM file with its key."`
	AdminClientCA  string   `name:"admin-client-ca"`
}

// ProcessSettings apply to every process.
type ProcessSettings struct {
	DrainTimeout time.Duration `help:"How long an orderly stop may take." type:"period" default:"10s"`
	LogLevel     slog.Level    `help:"debug, info, warn or error." type:"level" default:"info"`
	LogFormat    string        `type:"choice" of:"json,text" placeholder:"json"`
}

// Config are the settings that Parse has checked, and what follows from them.
type Config struct {
	Settings

	// Version is the version of the binary. It is no setting: main fills it in.
	Version string
	Slot    string
	// Publication is that of the schema.
	Publication string
	// RedisTLS are the files for both Redis URLs, HTTPTLS and AdminTLS those of the listeners; nil: without TLS.
	RedisTLS, HTTPTLS, AdminTLS *tlsfile.Files
	// MigrateFirst makes a relay apply the migrations of the outbox before it starts.
	MigrateFirst bool

	modes *modes
}

// OnOff is "on" or "off".
type OnOff string

// On reports whether o is "on".
func (o OnOff) On() bool { return o == "on" }

// The patterns bound no length: Go compiles a bound into as many copies, which would take a tenth of a command's start.
var (
	relayNamePattern = regexp.MustCompile(`^[a-z0-9_]+$`)
	schemaPattern    = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_]*$`)
	prefixPattern    = regexp.MustCompile(`^[a-zA-Z0-9_.:-]*$`)
	channelPattern   = regexp.MustCompile(`^([a-zA-Z0-9.:-][a-zA-Z0-9_.:-]*)?$`) // __ begins Redis' own
)

// relayNameOf returns the default name of the relay of a schema.
func relayNameOf(schema string) string {
	if schema == "public" || !schemaPattern.MatchString(schema) { // a bad schema is a fault of its own
		return "default"
	}
	return strings.ToLower(schema[:min(len(schema), 50)])
}

type parser struct {
	faults []error
	// files are those of the secrets, by flag.
	files map[string]secretfile.File
}

func (p *parser) fault(format string, args ...any) {
	p.faults = append(p.faults, fmt.Errorf(format, args...))
}

func (p *parser) bad(name, value, want string) {
	from := ""
	if v := variableOf(name); os.Getenv(v) == value && value != "" {
		from = " (" + v + ")"
	}
	p.fault("--%s=%q%s: want %s", name, value, from, want)
}

func (p *parser) match(name, value string, most int, re *regexp.Regexp, want string) string {
	if len(value) > most || !re.MatchString(value) {
		p.bad(name, value, want)
	}
	return value
}

// scheme checks the scheme of a URL. Its fault does not quote the URL, which may contain a password.
func (p *parser) scheme(name, value string, schemes ...string) bool {
	u, err := url.Parse(value)
	if err == nil && slices.Contains(schemes, u.Scheme) {
		return true
	}
	want := "want a URL that begins with " + strings.Join(schemes, ":// or ") + "://"
	if scheme, _, _ := strings.Cut(value, "://"); slices.Contains(schemes, scheme) {
		want = "not a URL; a password with special characters has to be percent-encoded"
	}
	p.fault("--%s: %s", name, want)
	return false
}

// OfAdminListener returns the settings of a command that only calls the admin listener of a running process. It drops
// the files of other settings: they may be damaged while the process still uses what it has read.
func (s Settings) OfAdminListener() Settings {
	s.HTTPTLSCert, s.HTTPTLSKey, s.HTTPClientCA = "", "", ""
	s.RedisCA, s.RedisCert, s.RedisKey, s.RedisSkipVerify = "", "", "", "off"
	s.Auth, s.AdminReadToken = "none", ""
	for _, x := range s.secrets() {
		s.Given = append(s.Given, x.flag)
	}
	return s
}

// Parse checks every setting and returns the Config, or one error that names every fault.
func (s Settings) Parse() (Config, error) {
	p := &parser{files: map[string]secretfile.File{}}
	for _, name := range slices.Sorted(maps.Keys(s.decoded.wants)) {
		if want := s.decoded.wants[name]; want != "" {
			p.bad(name, s.decoded.texts[name], want)
		}
	}
	p.readSecrets(&s)
	c := Config{Settings: s, Publication: sql.Publication(s.Schema), modes: &modes{by: map[string]string{}}}
	p.match("schema", s.Schema, 63, schemaPattern, "1 to 63 letters, digits or _, and no digit first")
	c.RelayName = p.match("relay-name", cmp.Or(s.RelayName, relayNameOf(s.Schema)), 50, relayNamePattern,
		"1 to 50 small letters, digits or _")
	p.match("stream-prefix", s.StreamPrefix, 64, prefixPattern, "at most 64 letters, digits or _.:-")
	p.match("channel-prefix", s.ChannelPrefix, 64, channelPattern,
		"at most 64 letters, digits or _.:-, and no _ first")
	c.Slot = "posthaste_" + c.RelayName
	c.PostgresURL = p.postgres(s.PostgresURL)
	c.PostgresURL = p.rereads(s, "postgres-url", postgresPassword, c.PostgresURL, hasPassword(c.PostgresURL))
	c.RedisURL = p.redis("redis-url", s.RedisURL)
	c.RedisURL = p.rereads(s, "redis-url", redisPassword, c.RedisURL, redisurl.HasPassword(c.RedisURL))
	if s.GuardRedisURL != "" {
		c.GuardRedisURL = p.redis("guard-redis-url", s.GuardRedisURL)
		c.GuardRedisURL = p.rereads(s, "guard-redis-url", "", c.GuardRedisURL, false)
	}
	if s.SinkURL != "" {
		if _, err := jetstream.ParseURL(s.SinkURL); err != nil {
			p.fault("--sink-url: %w", err)
		}
	}
	if c.AdminReadToken != "" && (c.AdminToken == "" || c.AdminToken == c.AdminReadToken) {
		p.fault("--admin-read-token needs --admin-token, another one")
	}
	p.auth(c)
	p.tls(&c)
	p.address("http-addr", c.HTTPAddr)
	p.address("admin-addr", c.AdminAddr)
	return c, errors.Join(p.faults...)
}

func (p *parser) auth(c Config) {
	switch c.Auth {
	case "keys":
		if c.AuthKeysFile == "" {
			p.fault("--auth=keys needs --auth-keys-file")
		} else if _, err := os.Stat(c.AuthKeysFile); err != nil {
			p.fault("--auth-keys-file: %w", err)
		}
	case "jwt":
		p.tokens(c.tokens())
	}
}

func (c Config) tokens() api.TokenOptions {
	return api.TokenOptions{
		Issuer: c.JWTIssuer, Audience: c.JWTAudience, JWKS: c.JWTJWKS, UserClaim: c.JWTUserClaim,
		ScopeClaim: c.JWTScopeClaim,
	}
}

func (p *parser) tokens(o api.TokenOptions) {
	for _, setting := range []struct{ name, value string }{
		{"jwt-issuer", o.Issuer},
		{"jwt-audience", o.Audience},
		{"jwt-jwks", o.JWKS},
		{"jwt-user-claim", o.UserClaim},
		{"jwt-scope-claim", o.ScopeClaim},
	} {
		if setting.value == "" {
			p.fault("--auth=jwt needs --%s", setting.name)
		}
	}
	if err := api.CheckJWKS(o.JWKS); o.JWKS != "" && err != nil {
		p.fault("--jwt-jwks: %w", err)
	}
}

func (p *parser) address(name, value string) {
	if value == "" {
		return
	}
	i := strings.LastIndexByte(value, ':')
	if i < 0 {
		p.bad(name, value, "host:port")
		return
	}
	if port, err := strconv.Atoi(value[i+1:]); err != nil || port < 0 || port > 65535 {
		p.bad(name, value, "host:port")
	}
}

// postgres returns the address of Postgres: the setting, else libpq's variables, else the default.
func (p *parser) postgres(value string) string {
	libpq := []string{"PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGPASSWORD", "PGSERVICE"}
	if value == "" && !slices.ContainsFunc(libpq, func(name string) bool { return os.Getenv(name) != "" }) {
		value = defaultPostgresURL
	}
	// A value without "://" is in libpq's keyword=value form.
	if strings.Contains(value, "://") && !p.scheme("postgres-url", value, "postgres", "postgresql") {
		return value
	}
	if _, err := sql.PoolConfig(value, "", ""); err != nil {
		p.fault("--postgres-url: %w", err)
	}
	return value
}

func (p *parser) redis(name, value string) string {
	if !p.scheme(name, value, "redis", "rediss", "unix") {
		return value
	}
	if hasQuery(value, "skip_verify") {
		p.fault("--%s: skip_verify is a setting of its own, --redis-skip-verify", name)
	} else if _, err := redisurl.Parse(value); err != nil {
		p.fault("--%s: %w", name, err)
	}
	return value
}

// EntrySource is the source field of this database's entries. On shared streams it identifies the database.
func (c Config) EntrySource() string { return outbox.EntrySource(c.RelayName) }

// Logger returns a logger that writes to standard error; standard output is for results.
func (c Config) Logger() *slog.Logger { return c.LoggerTo(os.Stderr) }

func (c Config) LoggerTo(w io.Writer) *slog.Logger {
	o := &slog.HandlerOptions{Level: c.LogLevel}
	if c.LogFormat == "text" || c.LogFormat == "" && cli.IsTerminal(os.Stderr) {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

// CreditDurability returns the durability that a credit operation waits for, which is --redis-durability.
func (c Config) CreditDurability() credits.Durability {
	return credits.Durability(c.RedisDurability)
}
