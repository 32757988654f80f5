"""NumPyro distributions, one row each: what the contract tests run through. Parameters have a batch of 4."""

import importlib.util

import jax.numpy as jnp
import numpyro.distributions as dist

V = jnp.array([0.3, 0.7, 1.1, 1.6])  # positive
R = jnp.array([-0.5, 0.2, 0.9, 1.4])  # real
U = jnp.array([0.2, 0.4, 0.6, 0.8])  # in (0, 1)
SIMPLEX = jnp.array([[0.2, 0.3, 0.5], [0.1, 0.1, 0.8], [0.4, 0.4, 0.2], [0.3, 0.3, 0.4]])
TRIL = jnp.array([[1.0, 0.0], [0.5, 0.8]])
COV = TRIL @ TRIL.T
ROWS = jnp.stack([R, R + 1.0], -1)  # (4, 2)

# name -> (constructor, parameters): the parameters are what may vary from shard to shard; axis 0 is the batch.
CONTINUOUS = {
    "Normal": (dist.Normal, (R, V)),
    "LogNormal": (dist.LogNormal, (R, V)),
    "HalfNormal": (dist.HalfNormal, (V,)),
    "Cauchy": (dist.Cauchy, (R, V)),
    "HalfCauchy": (dist.HalfCauchy, (V,)),
    "StudentT": (lambda v, r: dist.StudentT(3.0 + v, r, v), (V, R)),
    "Laplace": (dist.Laplace, (R, V)),
    "AsymmetricLaplace": (lambda r, v: dist.AsymmetricLaplace(r, v, v), (R, V)),
    "Logistic": (dist.Logistic, (R, V)),
    "Gumbel": (dist.Gumbel, (R, V)),
    "SoftLaplace": (dist.SoftLaplace, (R, V)),
    "Exponential": (dist.Exponential, (V,)),
    "Gamma": (dist.Gamma, (V, 2 * V)),
    "InverseGamma": (lambda v: dist.InverseGamma(2.0 + v, v), (V,)),
    "Chi2": (dist.Chi2, (V + 1,)),
    "Weibull": (dist.Weibull, (V, V + 1)),
    "Gompertz": (dist.Gompertz, (V, V)),
    "Pareto": (lambda v: dist.Pareto(1.0, v), (V,)),
    "LogUniform": (lambda v: dist.LogUniform(0.1, 1.0 + v), (V,)),
    "Uniform": (lambda v: dist.Uniform(-v, v), (V,)),
    "Beta": (dist.Beta, (V, V + 1)),
    "BetaProportion": (dist.BetaProportion, (U, V + 1)),
    "Kumaraswamy": (dist.Kumaraswamy, (V, V + 1)),
    "TruncatedNormal": (lambda r, v: dist.TruncatedNormal(r, v, low=-1.0, high=2.0), (R, V)),
    "LowerTruncatedNormal": (lambda r, v: dist.TruncatedNormal(r, v, low=-1.0), (R, V)),
    "TruncatedCauchy": (lambda r, v: dist.TruncatedCauchy(r, v, low=0.0), (R, V)),
    "TruncatedPolyaGamma": (lambda v: dist.TruncatedPolyaGamma(v.shape), (V,)),
    "DoublyTruncatedPowerLaw": (lambda r: dist.DoublyTruncatedPowerLaw(r, 0.1, 1.0), (R,)),
    "LowerTruncatedPowerLaw": (lambda v: dist.LowerTruncatedPowerLaw(-1.5 - v, 0.5), (V,)),
    "VonMises": (dist.VonMises, (R, V)),
    "Levy": (dist.Levy, (R, V)),
    "Dirichlet": (dist.Dirichlet, (SIMPLEX * 5,)),
    "LogisticNormal": (
        lambda r: dist.TransformedDistribution(
            dist.Normal(r, 1.0).to_event(1), dist.transforms.StickBreakingTransform()
        ),
        (ROWS,),
    ),
    "MultivariateNormal": (lambda r: dist.MultivariateNormal(r, COV), (ROWS,)),
    "MultivariateNormalTril": (lambda r: dist.MultivariateNormal(r, scale_tril=TRIL), (ROWS,)),
    "MultivariateNormalPrecision": (lambda r: dist.MultivariateNormal(r, precision_matrix=COV), (ROWS,)),
    "LowRankMultivariateNormal": (lambda r: dist.LowRankMultivariateNormal(r, jnp.ones((2, 1)), jnp.ones(2)), (ROWS,)),
    "MultivariateStudentT": (lambda r: dist.MultivariateStudentT(4.0, r, TRIL), (ROWS,)),
    "GaussianRandomWalk": (lambda v: dist.GaussianRandomWalk(v, num_steps=3), (V,)),
    "EulerMaruyama": (
        lambda r: dist.EulerMaruyama(jnp.arange(3.0), lambda x, t: (-x, 0.5), dist.Normal(r, 1.0).to_event(0)),
        (R,),
    ),
    "CAR": (lambda r: dist.CAR(r, 0.5, 1.0, jnp.array([[0.0, 1.0], [1.0, 0.0]])), (ROWS,)),
    "LKJ": (lambda v: dist.LKJ(3, v), (V,)),
    "LKJCholesky": (lambda v: dist.LKJCholesky(3, v), (V,)),
    "Wishart": (lambda v: dist.Wishart(3.0 + v, scale_tril=TRIL), (V,)),
    "WishartCholesky": (lambda v: dist.WishartCholesky(3.0 + v, scale_tril=TRIL), (V,)),
    "InverseWishart": (lambda v: dist.InverseWishart(4.0 + v, scale_tril=TRIL), (V,)),
    "MatrixNormal": (lambda r: dist.MatrixNormal(jnp.stack([r, r], -2), TRIL, TRIL), (ROWS,)),
    "ProjectedNormal": (dist.ProjectedNormal, (ROWS,)),
    "Independent": (lambda r: dist.Normal(r, 1.0).to_event(1), (ROWS,)),
    "Expanded": (lambda r: dist.Normal(r, 1.0).expand((4,)), (R,)),
    "Folded": (lambda r: dist.FoldedDistribution(dist.Normal(r, 1.0)), (R,)),
    "Transformed": (
        lambda r: dist.TransformedDistribution(dist.Normal(r, 1.0), dist.transforms.AffineTransform(1.0, -2.0)),
        (R,),
    ),
    "MixtureSameFamily": (
        lambda r: dist.MixtureSameFamily(dist.Categorical(probs=jnp.array([0.3, 0.7])), dist.Normal(r, 1.0)),
        (ROWS,),
    ),
    "MixtureGeneral": (
        lambda r: dist.MixtureGeneral(
            dist.Categorical(probs=jnp.array([0.3, 0.7])), [dist.Normal(r, 1.0), dist.Cauchy(r, 2.0)]
        ),
        (R,),
    ),
    "RelaxedBernoulli": (lambda r: dist.RelaxedBernoulliLogits(0.5, r), (R,)),
    "AsymmetricLaplaceQuantile": (lambda r, u: dist.AsymmetricLaplaceQuantile(r, 1.0, u), (R, U)),
    "CirculantNormal": (lambda r: dist.CirculantNormal(r, covariance_row=jnp.array([1.0, 0.3])), (ROWS,)),
    "GaussianCopula": (
        lambda v: dist.GaussianCopula(dist.Beta(jnp.stack([v, v], -1), 2.0), correlation_matrix=jnp.eye(2) + 0.0),
        (V,),
    ),
    "GaussianStateSpace": (
        lambda v: dist.GaussianStateSpace(3, 0.5 * jnp.eye(2), jnp.multiply.outer(v, jnp.eye(2))),
        (V,),
    ),
    "TruncatedGamma": (lambda v: dist.TruncatedGamma(v, 1.0, low=0.1, high=3.0), (V,)),
    "LeftTruncated": (lambda r: dist.LeftTruncatedDistribution(dist.Cauchy(r, 1.0), low=0.0), (R,)),
    "RightTruncated": (lambda r: dist.RightTruncatedDistribution(dist.Logistic(r, 1.0), high=1.0), (R,)),
    "LeftCensored": (lambda r: dist.LeftCensoredDistribution(dist.Normal(r, 1.0), jnp.zeros_like(r)), (R,)),
    "RightCensored": (lambda r: dist.RightCensoredDistribution(dist.Normal(r, 1.0), jnp.zeros_like(r)), (R,)),
    "SineBivariateVonMises": (
        lambda r: dist.SineBivariateVonMises(r, r, 1.0, 1.5, correlation=0.5),
        (R,),
    ),
    "SineSkewed": (
        lambda r: dist.SineSkewed(dist.VonMises(r, 1.0).to_event(0).expand(r.shape).to_event(1), 0.1 * jnp.ones(2)),
        (ROWS,),
    ),
    "ZeroSumNormal": (lambda v: dist.ZeroSumNormal(jnp.sum(v), (3,)), (V,)),
    "InverseWishartCholesky": (lambda v: dist.InverseWishartCholesky(4.0 + v, scale_tril=TRIL), (V,)),
    "Masked": (
        lambda r: dist.Normal(r, 1.0).mask(jnp.array([True, False, True, True])[: r.size].reshape(r.shape)),
        (R,),
    ),
    "Dagum": (lambda v: dist.Dagum(v + 1, v, v + 1), (V,)),
    "Unit": (lambda r: dist.Unit(r), (R,)),
    "Delta": (lambda r: dist.Delta(r), (R,)),
    "ImproperUniform": (lambda r: dist.ImproperUniform(dist.constraints.positive, r.shape, ()), (R,)),
}

DISCRETE = {
    "Bernoulli": (lambda u: dist.Bernoulli(probs=u), (U,)),
    "BernoulliLogits": (lambda r: dist.Bernoulli(logits=r), (R,)),
    "Binomial": (lambda u: dist.Binomial(5, probs=u), (U,)),
    "BinomialLogits": (lambda r: dist.Binomial(5, logits=r), (R,)),
    "BetaBinomial": (lambda v: dist.BetaBinomial(v, v + 1, 6), (V,)),
    "Categorical": (lambda p: dist.Categorical(probs=p), (SIMPLEX,)),
    "CategoricalLogits": (lambda p: dist.Categorical(logits=p), (SIMPLEX,)),
    "DirichletMultinomial": (lambda p: dist.DirichletMultinomial(p * 5, 6), (SIMPLEX,)),
    "DiscreteUniform": (lambda v: dist.DiscreteUniform(jnp.zeros_like(v, int), 5), (V,)),
    "Geometric": (lambda u: dist.Geometric(probs=u), (U,)),
    "GeometricLogits": (lambda r: dist.Geometric(logits=r), (R,)),
    "GammaPoisson": (dist.GammaPoisson, (V, V + 1)),
    "NegativeBinomial2": (lambda v: dist.NegativeBinomial2(v, 2.0), (V,)),
    "NegativeBinomialLogits": (lambda r: dist.NegativeBinomialLogits(3.0, r), (R,)),
    "NegativeBinomialProbs": (lambda u: dist.NegativeBinomialProbs(3.0, u), (U,)),
    "Multinomial": (lambda p: dist.Multinomial(6, probs=p), (SIMPLEX,)),
    "OrderedLogistic": (lambda r: dist.OrderedLogistic(r, jnp.array([-1.0, 0.5])), (R,)),
    "Poisson": (dist.Poisson, (V,)),
    "ZeroInflatedPoisson": (lambda u, v: dist.ZeroInflatedPoisson(u, v), (U, V)),
    "ZeroInflatedNegativeBinomial2": (lambda u, v: dist.ZeroInflatedNegativeBinomial2(v, 2.0, gate=u), (U, V)),
    "BetaNegativeBinomial": (lambda v: dist.BetaNegativeBinomial(v + 1, v, 3.0), (V,)),
    "HurdlePoisson": (lambda u, v: dist.HurdlePoisson(u, v), (U, V)),
    "ZeroInflated": (lambda u: dist.ZeroInflatedDistribution(dist.Poisson(2.0), gate=u), (U,)),
    "DiscreteExpanded": (lambda u: dist.Bernoulli(u).expand((4,)).to_event(1), (U,)),
}

# Samplers that NumPyro gives floats to although the support is discrete; here such a site is an integer.
FLOATS_OF_A_DISCRETE_SUPPORT = {"DirichletMultinomial", "Geometric", "GeometricLogits", "Multinomial"}
NO_SAMPLER = {"ImproperUniform"}
# Not rows of their own: bases, aliases of rows, functions, and wrappers that the rows use; and HurdleNegativeBinomial2,
# whose tree NumPyro 0.22 cannot put together again.
COVERED = [
    "biject_to",
    "constraints",
    "kl_divergence",
    "transforms",
    "Distribution",
    "BernoulliProbs",
    "BinomialProbs",
    "CategoricalProbs",
    "ExpandedDistribution",
    "FoldedDistribution",
    "GaussianCopulaBeta",
    "GeometricProbs",
    "HurdleDistribution",
    "HurdleGamma",
    "HurdleLogits",
    "HurdleLogNormal",
    "HurdleNegativeBinomial2",
    "HurdleProbs",
    "LeftTruncatedDistribution",
    "LeftTruncatedGamma",
    "MaskedDistribution",
    "Mixture",
    "MultinomialLogits",
    "MultinomialProbs",
    "NegativeBinomial",
    "RelaxedBernoulliLogits",
    "RightTruncatedDistribution",
    "RightTruncatedGamma",
    "LeftCensoredDistribution",
    "RightCensoredDistribution",
    "IntervalCensoredDistribution",
    "TransformedDistribution",
    "TruncatedDistribution",
    "TwoSidedTruncatedDistribution",
    "TwoSidedTruncatedGamma",
    "ZeroInflatedDistribution",
    "ZeroInflatedLogits",
    "ZeroInflatedProbs",
]

# What the oldest supported NumPyro lacks, or computes by TFP, which is optional.
if importlib.util.find_spec("tensorflow_probability") is None:
    del CONTINUOUS["GaussianCopula"]
for _table, _name in ((DISCRETE, "HurdlePoisson"), (CONTINUOUS, "TruncatedGamma")):
    if not hasattr(dist, _name):
        del _table[_name]
