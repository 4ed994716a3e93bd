package app

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"net/url"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/dustin/go-humanize"

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

// Settings are all settings. They are text until Parse has checked all of them, so that it names every fault at once.
// docs/configuration.md is generated from the struct.
type Settings struct {
	ServerSettings  `group:"Servers"`
	NameSettings    `group:"Names"`
	RelaySettings   `group:"Relay"`
	APISettings     `group:"API"`
	AdminSettings   `group:"Admin listener"`
	ProcessSettings `group:"Process"`

	// Given are the names of the flags on the command line. It is no setting: main fills it in.
	Given []string `kong:"-"`
}

// ServerSettings are about Postgres and Redis.
type ServerSettings struct {
	PostgresURL     string `placeholder:"postgres://localhost:5432/postgres"`
	RedisURL        string `default:"redis://localhost:6379/0"`
	GuardRedisURL   string `placeholder:"redis://localhost:6380/0"`
	RedisDurability string `default:"none"`
	SinkURL         string `name:"sink-url" placeholder:"nats://localhost:4222"`
	SinkDurability  string `default:"fsync"`
	SinkReplicas    string `default:"1"`
	RedisCA         string `name:"redis-ca"`
	RedisCert       string `help:"PEM file with the certificate to show to Redis."`
	RedisKey        string `help:"PEM file with its key."`
	RedisSkipVerify string `default:"off"`
}

// NameSettings name what one outbox consists of.
type NameSettings struct {
	Schema        string `help:"Schema of posthaste's tables." default:"public"`
	RelayName     string `placeholder:"default"`
	StreamPrefix  string `help:"The stream is this prefix and the aggregate type." default:"outbox."`
	SharedStreams string `default:"off"`
}

// RelaySettings are those of the relay.
type RelaySettings struct {
	Pubsub        string `help:"Also PUBLISH payloads on the channel named by the event type: on or off." default:"on"`
	ChannelPrefix string `help:"The channel is this prefix and the event type."`
	History       string `help:"How long delivered events are kept; 0 keeps none." default:"72h"`
	Restore       string `default:"1h"`
	WALBudget     string `name:"wal-budget" default:"1GiB"`
	Window        string `help:"Events read and not yet marked as published." default:"10000"`
	WindowBytes   string `help:"Bytes of such events." default:"64MiB"`
	SweepWorkers  string `help:"Connections that read the table at once, in poll." default:"2"`
	Poison        string `default:"skip"`
	Trim          string `default:"acked"`
	StreamMaxlen  string `help:"About how many entries a stream keeps; 0: all." default:"1000000"`
}

// APISettings are those of the public API.
type APISettings struct {
	HTTPAddr         string `name:"http-addr" help:"Public API." default:"127.0.0.1:8080"`
	HTTPTLSCert      string `name:"http-tls-cert"`
	HTTPTLSKey       string `name:"http-tls-key" help:"PEM file with its key."`
	HTTPClientCA     string `name:"http-client-ca" help:"PEM file with CAs: require client certificates by them."`
	RateLimit        string `help:"Requests per second and API key, or user of a token; 0 is off." default:"0"`
	AddressRateLimit string `default:"0"`
	TrustedProxies   string
	MaxConnections   string `default:"10000"`
	KeyMaxAge        string `help:"Refuse older UUIDv7 idempotency keys that have no order; 0 is off." default:"0"`
	Auth             string `help:"none (user_id comes from the body; a loud warning), keys or jwt." default:"none"`
	AuthKeysFile     string
	JWTIssuer        string `name:"jwt-issuer" help:"With auth=jwt: the issuer (iss) of the tokens, exactly."`
	JWTAudience      string `name:"jwt-audience" help:"With auth=jwt: the audience (aud) of the tokens."`
	JWTJWKS          string `name:"jwt-jwks"`
	JWTUserClaim     string `name:"jwt-user-claim" default:"sub"`
	JWTScopeClaim    string `name:"jwt-scope-claim" default:"scope"`
}

// AdminSettings are those of the admin listener.
type AdminSettings struct {
	AdminAddr      string `placeholder:"127.0.0.1:9090"`
	AdminToken     string `help:"Bearer token that everything on the admin listener requires but health and metrics."`
	AdminReadToken string
	AdminHosts     string `help:"Further names, separated by commas, that the admin listener answers to."`
	AdminOpen      string `default:"off"`
	AdminPprof     string `help:"Serve profiles: on or off." default:"off"`
	AdminTLSCert   string `name:"admin-tls-cert"`
	AdminTLSKey    string `name:"admin-tls-key" help:"PEM file with its key."`
	AdminClientCA  string `name:"admin-client-ca"`
}

// ProcessSettings apply to every process.
type ProcessSettings struct {
	DrainTimeout string `help:"How long an orderly stop may take." default:"10s"`
	LogLevel     string `help:"debug, info, warn or error." default:"info"`
	LogFormat    string `help:"json or text. Default: text on a terminal, else json." placeholder:"json"`
}

// Config is the parsed Settings.
type Config struct {
	// Version is the version of the binary. It is no setting: main fills it in.
	Version string

	PostgresURL string
	RedisURL    string
	// GuardRedisURL is empty if the guard uses RedisURL.
	GuardRedisURL string
	// SinkURL names servers of NATS; empty if events are published to Redis. SinkFsync is --sink-durability=fsync.
	SinkURL      string
	SinkFsync    bool
	SinkReplicas int
	HTTPAddr     string
	AdminAddr    string
	AdminToken   string
	// AdminReadToken may only read. AdminHosts are further names of the admin listener. AdminOpen allows it beyond
	// loopback without a token. AdminProfiles makes it serve profiles.
	AdminReadToken string
	AdminHosts     []string
	AdminOpen      bool
	AdminProfiles  bool
	// RedisTLS are the files for both Redis URLs. RedisSkipVerify turns the verification of the certificate off.
	RedisTLS        *tlsfile.Files
	RedisSkipVerify bool
	// HTTPTLS and AdminTLS are the certificates of the listeners; nil: HTTP. With AdminMTLS, the admin listener
	// requires certificates of its clients.
	HTTPTLS   *tlsfile.Files
	AdminTLS  *tlsfile.Files
	AdminMTLS bool
	Schema    string
	RelayName string
	Slot      string
	// Publication is that of the schema.
	Publication  string
	StreamPrefix string
	// MigrateFirst makes a relay apply the migrations of the outbox before it starts.
	MigrateFirst bool
	// SharedStreams lets other databases publish to the same streams.
	SharedStreams bool
	PubSub        bool
	ChannelPrefix string
	History       time.Duration
	// Restore is relay.Options.Restore.
	Restore      time.Duration
	WALBudget    int64
	Durability   sink.Durability
	Window       int
	WindowBytes  int
	SweepWorkers int
	Poison       relay.Poison
	TrimForce    bool
	StreamMaxlen int64
	RateLimit    float64
	KeyMaxAge    time.Duration
	AuthKeys     bool
	AuthKeysFile string
	DrainTimeout time.Duration
	LogLevel     slog.Level
	LogText      bool
	// AuthJWT makes the API accept tokens, as Tokens configures.
	AuthJWT bool
	Tokens  api.TokenOptions
	// See api.Options.
	AddressRateLimit float64
	TrustedProxies   []netip.Prefix
	// MaxConnections is the largest number of connections of the public listener.
	MaxConnections int

	modes *modes
}

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

func (p *parser) choice(name, value string, options ...string) string {
	if slices.Contains(options, value) {
		return value
	}
	p.bad(name, value, strings.Join(options[:len(options)-1], ", ")+" or "+options[len(options)-1])
	return ""
}

func (p *parser) on(name, value string) bool { return p.choice(name, value, "on", "off") == "on" }

func (p *parser) match(name, value string, most int, re *regexp.Regexp, want string) string {
	if len(value) > most || !re.MatchString(value) {
		p.bad(name, value, want)
	}
	return value
}

func (p *parser) number(name, value string, least, most int64) int64 {
	n, err := strconv.ParseInt(value, 10, 64)
	if err != nil || n < least || n > most {
		p.bad(name, value, fmt.Sprintf("a whole number from %d to %d", least, most))
	}
	return n
}

func (p *parser) size(name, value string, least uint64) int64 {
	n, err := humanize.ParseBytes(value)
	if err != nil || n < least || n > 1<<50 {
		p.bad(name, value, "a size of at least "+humanize.IBytes(least)+", such as 64MiB")
	}
	return int64(n) //nolint:gosec // at most 1<<50, or there is a fault
}

func (p *parser) duration(name, value string, least time.Duration) time.Duration {
	d, err := cli.ParseDuration(value)
	if err != nil || d < least {
		p.bad(name, value, fmt.Sprintf("a duration of at least %v, such as 3d, 72h or 10s", least))
	}
	return d
}

func (p *parser) restore(value string) time.Duration {
	switch value {
	case "off":
		return 0
	case "all":
		return relay.RestoreAll
	}
	d, err := cli.ParseDuration(value)
	if err != nil || d <= 0 {
		p.bad("restore", value, "off, all, or a duration such as 1h")
	}
	return d
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
	p.readSecrets(&s)
	c := Config{
		modes:    &modes{by: map[string]string{}},
		HTTPAddr: s.HTTPAddr, AdminAddr: s.AdminAddr, AdminToken: s.AdminToken, AuthKeysFile: s.AuthKeysFile,
		AdminReadToken: s.AdminReadToken, AdminHosts: p.hosts("admin-hosts", s.AdminHosts),
		AdminOpen:     p.on("admin-open", s.AdminOpen),
		AdminProfiles: p.on("admin-pprof", s.AdminPprof),
		Schema: p.match("schema", s.Schema, 63, schemaPattern,
			"1 to 63 letters, digits or _, and no digit first"),
		RelayName: p.match("relay-name", cmp.Or(s.RelayName, relayNameOf(s.Schema)), 50, relayNamePattern,
			"1 to 50 small letters, digits or _"),
		Publication: sql.Publication(s.Schema),
		StreamPrefix: p.match("stream-prefix", s.StreamPrefix, 64, prefixPattern,
			"at most 64 letters, digits or _.:-"),
		SharedStreams: p.on("shared-streams", s.SharedStreams),
		PubSub:        p.on("pubsub", s.Pubsub),
		ChannelPrefix: p.match("channel-prefix", s.ChannelPrefix, 64, channelPattern,
			"at most 64 letters, digits or _.:-, and no _ first"),
		History:      p.duration("history", s.History, 0),
		Restore:      p.restore(s.Restore),
		WALBudget:    p.size("wal-budget", s.WALBudget, 16<<20),
		Window:       int(p.number("window", s.Window, 1, 10_000_000)),
		WindowBytes:  int(p.size("window-bytes", s.WindowBytes, 1<<20)),
		SinkReplicas: int(p.number("sink-replicas", s.SinkReplicas, 1, 5)),
		SweepWorkers: int(p.number("sweep-workers", s.SweepWorkers, 1, outbox.Partitions)),
		Poison: relay.Poison(p.choice("poison", s.Poison, string(relay.PoisonSkip),
			string(relay.PoisonBlockKey))),
		TrimForce:    p.choice("trim", s.Trim, "acked", "force") == "force",
		StreamMaxlen: p.number("stream-maxlen", s.StreamMaxlen, 0, 1<<40),
		KeyMaxAge:    p.duration("key-max-age", s.KeyMaxAge, 0),
		DrainTimeout: p.duration("drain-timeout", s.DrainTimeout, 0),
		Tokens: api.TokenOptions{
			Issuer: s.JWTIssuer, Audience: s.JWTAudience, JWKS: s.JWTJWKS, UserClaim: s.JWTUserClaim,
			ScopeClaim: s.JWTScopeClaim,
		},
	}
	c.Slot = "posthaste_" + c.RelayName
	c.PostgresURL = p.postgres(s.PostgresURL)
	c.PostgresURL = p.rereads(s, "postgres-url", postgresPassword, c.PostgresURL, hasPassword(c.PostgresURL))
	c.RedisURL = p.redis("redis-url", s.RedisURL)
	c.RedisURL = p.rereads(s, "redis-url", redisPassword, c.RedisURL, redisurl.HasPassword(c.RedisURL))
	if s.GuardRedisURL != "" {
		c.GuardRedisURL = p.redis("guard-redis-url", s.GuardRedisURL)
		c.GuardRedisURL = p.rereads(s, "guard-redis-url", "", c.GuardRedisURL, false)
	}
	if c.SinkFsync = p.choice("sink-durability", s.SinkDurability, "fsync", "none") == "fsync"; s.SinkURL != "" {
		c.SinkURL = s.SinkURL
		if _, err := jetstream.ParseURL(s.SinkURL); err != nil {
			p.fault("--sink-url: %w", err)
		}
	}
	c.RateLimit = p.rate("rate-limit", s.RateLimit)
	c.AddressRateLimit = p.rate("address-rate-limit", s.AddressRateLimit)
	c.TrustedProxies = p.networks("trusted-proxies", s.TrustedProxies)
	c.MaxConnections = int(p.number("max-connections", s.MaxConnections, 1, 1_000_000))
	var err error
	if c.Durability, err = sink.ParseDurability(s.RedisDurability); err != nil {
		p.bad("redis-durability", s.RedisDurability, "none, replicas=N or aof")
	}
	if c.AdminReadToken != "" && (c.AdminToken == "" || c.AdminToken == c.AdminReadToken) {
		p.fault("--admin-read-token needs --admin-token, another one")
	}
	p.auth(s.Auth, &c)
	p.tls(&c, s)
	p.address("http-addr", c.HTTPAddr)
	p.address("admin-addr", c.AdminAddr)
	if err := c.LogLevel.UnmarshalText([]byte(s.LogLevel)); err != nil {
		p.bad("log-level", s.LogLevel, "debug, info, warn or error")
	}
	if c.LogText = cli.IsTerminal(os.Stderr); s.LogFormat != "" {
		c.LogText = p.choice("log-format", s.LogFormat, "json", "text") == "text"
	}
	return c, errors.Join(p.faults...)
}

func (p *parser) auth(value string, c *Config) {
	switch p.choice("auth", value, "none", "keys", "jwt") {
	case "keys":
		c.AuthKeys = true
		if c.AuthKeysFile == "" {
			p.fault("--auth=keys needs --auth-keys-file")
		} else if _, err := os.Stat(c.AuthKeysFile); err != nil {
			p.fault("--auth-keys-file: %w", err)
		}
	case "jwt":
		c.AuthJWT = true
		p.tokens(c.Tokens)
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

func (p *parser) rate(name, value string) float64 {
	perSecond, err := strconv.ParseFloat(value, 64)
	if err != nil || !(perSecond >= 0 && perSecond < 1e9) {
		p.bad(name, value, "requests per second, 0 for off")
	}
	return perSecond
}

// networks parses addresses and CIDRs.
func (p *parser) networks(name, value string) []netip.Prefix {
	var list []netip.Prefix
	for text := range strings.SplitSeq(value, ",") {
		text = strings.TrimSpace(text)
		if text == "" && value == "" {
			return nil
		}
		n, err := netip.ParsePrefix(text)
		if a, notAddress := netip.ParseAddr(text); notAddress == nil {
			n, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil || n.Addr().Is4In6() || n.Addr().Zone() != "" {
			p.bad(name, value, "addresses or networks such as 10.0.0.0/8, separated by commas")
			return nil
		}
		list = append(list, n)
	}
	return list
}

var hostPattern = regexp.MustCompile(`^[a-zA-Z0-9._:-]+$`)

// hosts parses names and addresses without ports.
func (p *parser) hosts(name, value string) []string {
	if value == "" {
		return nil
	}
	var list []string
	for host := range strings.SplitSeq(value, ",") {
		host = strings.Trim(strings.TrimSpace(host), "[]")
		_, port, err := net.SplitHostPort(host)
		if len(host) > 253 || !hostPattern.MatchString(host) || err == nil && port != "" {
			p.bad(name, value, "names without ports, separated by commas")
			return nil
		}
		list = append(list, host)
	}
	return list
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
	if c.LogText {
		return slog.New(slog.NewTextHandler(w, o))
	}
	return slog.New(slog.NewJSONHandler(w, o))
}

// CreditDurability returns the durability that a credit operation waits for, which is --redis-durability.
func (c Config) CreditDurability() credits.Durability {
	return credits.Durability{Replicas: c.Durability.Replicas, AOF: c.Durability.AOF}
}
