package app

import (
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/alecthomas/kong"
	"github.com/dustin/go-humanize"

	"posthaste/internal/cli"
	"posthaste/relay"
	"posthaste/sink"
)

// decoded is what the parser of the command line has found in the settings that have a type, by flag. It keeps what is
// wanted instead of the texts that are bad, because the parser would stop at the first of them.
type decoded struct {
	texts, wants map[string]string
	// given are the flags on the command line. The parser decodes them before the defaults, and they beat these.
	given map[string]bool
}

// Decoding is an option of the parser that fills in s. It decodes the types of the settings, and names their variables
// of the environment: that of --wal-budget is POSTHASTE_WAL_BUDGET.
func (s *Settings) Decoding() kong.Option {
	s.decoded = &decoded{map[string]string{}, map[string]string{}, map[string]bool{}}
	return kong.OptionFunc(func(k *kong.Kong) error {
		for name, decode := range types {
			if err := kong.NamedMapper(name, s.decoded.mapper(decode)).Apply(k); err != nil {
				return err
			}
		}
		return kong.PostBuild(nameVariables).Apply(k)
	})
}

func (d *decoded) mapper(decode decoder) kong.MapperFunc {
	return func(ctx *kong.DecodeContext, target reflect.Value) error {
		name, text := ctx.Value.Name, ""
		if err := ctx.Scan.PopValueInto(name, &text); err != nil {
			return err
		}
		v, want := decode(ctx.Value.Tag, text)
		if want == "" {
			target.Set(reflect.ValueOf(v).Convert(target.Type()))
		}
		isDefault := target.Addr().Pointer() == ctx.Value.Target.Addr().Pointer()
		if isDefault && d.given[name] {
			return nil
		}
		d.given[name], d.texts[name], d.wants[name] = !isDefault, text, want
		return nil
	}
}

// decoder returns the value of a text, or what is wanted instead.
type decoder func(t *kong.Tag, text string) (v any, want string)

// types are the types in the tags of the settings.
var types = map[string]decoder{
	"choice":     choice,
	"number":     number,
	"size":       size,
	"period":     period,
	"restore":    restore,
	"rate":       rate,
	"durability": durability,
	"level":      level,
	"hosts":      hosts,
	"networks":   networks,
}

func choice(t *kong.Tag, text string) (any, string) {
	options := strings.Split(t.Get("of"), ",")
	if slices.Contains(options, text) || text == "" && !t.Has("default") {
		return text, ""
	}
	last := len(options) - 1
	return nil, strings.Join(options[:last], ", ") + " or " + options[last]
}

func number(t *kong.Tag, text string) (any, string) {
	n, err := strconv.ParseInt(text, 10, 64)
	least, lerr := strconv.ParseInt(t.Get("least"), 10, 64)
	most, merr := strconv.ParseInt(t.Get("most"), 10, 64)
	if err != nil || lerr != nil || merr != nil || n < least || n > most {
		return nil, fmt.Sprintf("a whole number from %d to %d", least, most)
	}
	return n, ""
}

func size(t *kong.Tag, text string) (any, string) {
	n, err := humanize.ParseBytes(text)
	least, lerr := humanize.ParseBytes(t.Get("least"))
	if err != nil || lerr != nil || n < least || n > 1<<50 {
		return nil, "a size of at least " + humanize.IBytes(least) + ", such as 64MiB"
	}
	return n, ""
}

func period(_ *kong.Tag, text string) (any, string) {
	d, err := cli.ParseDuration(text)
	if err != nil || d < 0 {
		return nil, "a duration of at least 0s, such as 3d, 72h or 10s"
	}
	return d, ""
}

func restore(_ *kong.Tag, text string) (any, string) {
	switch text {
	case "off":
		return 0, ""
	case "all":
		return relay.RestoreAll, ""
	}
	d, err := cli.ParseDuration(text)
	if err != nil || d <= 0 {
		return nil, "off, all, or a duration such as 1h"
	}
	return d, ""
}

func rate(_ *kong.Tag, text string) (any, string) {
	perSecond, err := strconv.ParseFloat(text, 64)
	if err != nil || !(perSecond >= 0 && perSecond < 1e9) {
		return nil, "requests per second, 0 for off"
	}
	return perSecond, ""
}

func durability(_ *kong.Tag, text string) (any, string) {
	d, err := sink.ParseDurability(text)
	if err != nil {
		return nil, "none, replicas=N or aof"
	}
	return d, ""
}

func level(_ *kong.Tag, text string) (any, string) {
	var l slog.Level
	if l.UnmarshalText([]byte(text)) != nil {
		return nil, "debug, info, warn or error"
	}
	return l, ""
}

// networks decodes addresses and CIDRs.
func networks(_ *kong.Tag, text string) (any, string) {
	var list []netip.Prefix
	for part := range strings.SplitSeq(text, ",") {
		part = strings.TrimSpace(part)
		if part == "" && text == "" {
			break
		}
		n, err := netip.ParsePrefix(part)
		if a, notAddress := netip.ParseAddr(part); notAddress == nil {
			n, err = netip.PrefixFrom(a, a.BitLen()), nil
		}
		if err != nil || n.Addr().Is4In6() || n.Addr().Zone() != "" {
			return nil, "addresses or networks such as 10.0.0.0/8, separated by commas"
		}
		list = append(list, n)
	}
	return list, ""
}

var hostPattern = regexp.MustCompile(`^[a-zA-Z0-9._:-]+$`)

// hosts decodes names and addresses without ports.
func hosts(_ *kong.Tag, text string) (any, string) {
	var list []string
	for host := range strings.SplitSeq(text, ",") {
		if text == "" {
			break
		}
		host = strings.Trim(strings.TrimSpace(host), "[]")
		_, port, err := net.SplitHostPort(host)
		if len(host) > 253 || !hostPattern.MatchString(host) || err == nil && port != "" {
			return nil, "names without ports, separated by commas"
		}
		list = append(list, host)
	}
	return list, ""
}
